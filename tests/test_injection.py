"""Injected slowness multiplies what is executed: schedules, delays, balanced layers and any other model."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from zeroresize import functional
from zeroresize.injection import SlowOps, StragglerInjector, round_robin, static
from zeroresize.injection.delay import Delays, HostDelay
from zeroresize.injection.device_delay import CudaDevice, DeviceDelay
from zeroresize.injection.schedule import checked_chi
from zeroresize.injection.slow_layers import SlowLayers
from zeroresize.linear import BalancedLinear, ColumnParallelLinear, RowParallelLinear
from zeroresize.probe import Probe


class FakeTime:
    """A clock that only moves when told, and a sleep that ends late."""

    def __init__(self, overshoot_s=0.0):
        self.now_s = 0.0
        self.overshoot_s = overshoot_s
        self.sleeps = []

    def clock(self):
        return self.now_s

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now_s += seconds + self.overshoot_s


class Recorder(Probe):
    """Sums the wall time of gemms as they look from where it stands."""

    def __init__(self):
        self.gemm_s = 0.0

    def gemm_begins(self, operands):
        self._gemm = time.perf_counter()

    def gemm_ends(self, operands):
        self.gemm_s += time.perf_counter() - self._gemm


def mlp(group, in_features=8, hidden=16):
    torch.manual_seed(0)
    return nn.Sequential(
        ColumnParallelLinear.from_linear(nn.Linear(in_features, hidden), process_group=group),
        nn.GELU(),
        RowParallelLinear.from_linear(nn.Linear(hidden, in_features), process_group=group),
    )


def train_step(model, num_features=8, num_tokens=4):
    x = torch.linspace(-1, 1, num_tokens * num_features).view(num_tokens, num_features).requires_grad_()
    model(x).square().sum().backward()
    return x.grad


# ---- who is slow --------------------------------------------------------------------------------------------------


def test_round_robin_makes_each_rank_slow_in_turn():
    schedule = round_robin(chi=3.0)
    assert [schedule(epoch, 3) for epoch in range(4)] == [{0: 3.0}, {1: 3.0}, {2: 3.0}, {0: 3.0}]
    assert round_robin()(0, 2) == {0: 2.0}


def test_static_keeps_the_stragglers_and_zero_means_one():
    assert static({0: 8, 1: 6})(5, 2) == {0: 8, 1: 6}
    assert checked_chi({0: 0, 1: 2.5}, 2) == {0: 1.0, 1: 2.5}


@pytest.mark.parametrize(
    ("chi", "kind", "message"),
    [
        ({2: 4.0}, "sleep", r"chi=\{2: 4.0\}: rank 2 .* allowed are 0 to 1"),
        ({-1: 4.0}, "sleep", "rank -1"),
        ({"0": 4.0}, "sleep", "rank '0'"),
        ({0: 0.5}, "sleep", r"chi=\{0: 0.5\} is not allowed.*at least 1"),
        ({0: -2.0}, "sleep", "at least 1"),
        ({0: float("nan")}, "sleep", "finite"),
        ({0: float("inf")}, "sleep", "finite"),
        ({0: True}, "sleep", "finite"),
        ({0: "4"}, "sleep", "finite"),
        ({0: 2.5}, "contend", "whole number"),
        (4.0, "sleep", "mapping of rank to χ"),
    ],
)
def test_wrong_chi_is_named(chi, kind, message):
    with pytest.raises(ValueError, match=message):
        checked_chi(chi, 2, kind)


def test_wrong_arguments_are_named(run_ranks):
    def check(rank, group):
        model = mlp(group)
        for arguments, message in [
            ({"process_group": None, "chi": {0: 2.0}}, "process_group=None"),
            ({}, "chi=None, schedule=None: exactly one"),
            ({"chi": {0: 2.0}, "schedule": round_robin()}, "exactly one"),
            ({"chi": {1: 2.0}}, "rank 1"),
            ({"schedule": static({3: 2.0})}, "rank 3"),
            ({"chi": {0: 2.0}, "scope": "half"}, r"scope='half' is not allowed: choose one of \['gemm', 'all'\]"),
            ({"chi": {0: 2.0}, "kind": "nap"}, r"kind='nap' is not allowed: choose one of \['sleep', 'contend'\]"),
            ({"chi": {0: 2.5}, "kind": "contend"}, "whole number"),
        ]:
            with pytest.raises(ValueError, match=message):
                StragglerInjector(model, **{"process_group": group, **arguments})
        for empty in (nn.Sequential(nn.LayerNorm(4), nn.GELU()), nn.Embedding(4, 4)):
            with pytest.raises(ValueError, match="no linear layers"):
                StragglerInjector(empty, process_group=group, chi={0: 2.0})

    run_ranks(check, 1)


# ---- how long: the host -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("product_s", [20e-6, 300e-6, 5e-3])
@pytest.mark.parametrize("chi", [1.1, 2.0, 8.0])
def test_delay_is_exact_on_average_though_sleeping_ends_late(product_s, chi):
    fake = FakeTime(overshoot_s=80e-6)
    delay = HostDelay(clock=fake.clock, sleep=fake.sleep)
    delay.chi = chi
    num_products = 1000
    for _ in range(num_products):
        delay.begins()
        fake.now_s += product_s
        delay.ends()
    wanted_s = num_products * product_s * chi
    assert fake.now_s == pytest.approx(wanted_s, abs=200e-6)
    assert delay.seconds_added == pytest.approx(fake.now_s - num_products * product_s)
    assert delay.num_products == num_products
    assert min(fake.sleeps) >= 100e-6


def test_delay_follows_each_long_product_at_once():
    fake = FakeTime()
    delay = HostDelay(clock=fake.clock, sleep=fake.sleep)
    delay.chi = 3.0
    for product_s in (1e-3, 4e-3):
        delay.begins()
        fake.now_s += product_s
        delay.ends()
    assert fake.sleeps == pytest.approx([2e-3, 8e-3])


def test_without_slowness_nothing_sleeps_and_a_change_drops_the_debt():
    fake = FakeTime(overshoot_s=50e-3)
    delay = HostDelay(clock=fake.clock, sleep=fake.sleep)
    for chi in (2.0, 1.0, 3.0):
        delay.chi = chi
        delay.begins()
        fake.now_s += 1e-3
        delay.ends()
    assert fake.sleeps == pytest.approx([1e-3, 2e-3])


# ---- how long: a device -------------------------------------------------------------------------------------------


class FakeDevice:
    """A stream in virtual time: marks are positions on it, passed only ``lag`` marks later."""

    def __init__(self, lag=12):
        self.now_s, self.lag, self.marks, self.recycled, self.num_waits = 0.0, lag, [], 0, 0
        self.seconds_per_cycle = 1e-9
        self.launch_s = 3e-6

    def run(self, seconds):
        self.now_s += seconds

    def mark(self):
        self.marks.append((len(self.marks), self.now_s))
        return self.marks[-1]

    def seconds(self, begin, end):
        return end[1] - begin[1]

    def has_passed(self, mark):
        return len(self.marks) - mark[0] > self.lag

    def wait_for(self, mark):
        self.num_waits += 1

    def recycle(self, marks):
        self.recycled += len(marks)

    def spin(self, cycles):
        self.now_s += cycles * self.seconds_per_cycle + self.launch_s


def slowed_on(device, delay, products):
    """Seconds of products and of everything on the stream."""
    begin_s, products_s = device.now_s, 0.0
    for key, seconds in products:
        delay.begins()
        device.run(seconds)
        products_s += seconds
        delay.ends(key)
    return products_s, device.now_s - begin_s


def test_device_delay_is_exact_though_clocks_drift_and_products_vary():
    device = FakeDevice()
    delay = DeviceDelay(device)
    delay.chi = 4.0
    slowed_on(device, delay, [("small", 5e-3), ("large", 9e-3)])  # first executions load kernels
    num_waits = device.num_waits
    device.seconds_per_cycle = 1.3e-9  # the clock falls after calibration
    products = [("small", 50e-6 * (1 + 0.2 * (i % 3))) for i in range(500)] + [("large", 2e-3)] * 200
    products_s, total_s = slowed_on(device, delay, products)
    assert total_s / products_s == pytest.approx(4.0, rel=0.02)
    assert device.num_waits == num_waits == 3  # calibration, and the first execution of either key
    assert delay.num_products == 702
    assert device.recycled > 2000


def test_device_delay_does_nothing_without_slowness():
    device = FakeDevice()
    slowed_on(device, DeviceDelay(device), [("a", 1e-3)])
    assert device.marks == [] and device.now_s == 1e-3


def test_each_device_has_its_own_delay_with_the_same_chi():
    delays = Delays(make_device_delay=lambda _: DeviceDelay(FakeDevice()))
    delays.chi = 2.0
    first, second, host = (delays.on(torch.device(name)) for name in ("cuda:0", "cuda:1", "cpu"))
    assert first is delays.on(torch.device("cuda:0")) and first is not second
    assert [first.chi, second.chi, host.chi] == [2.0] * 3
    delays.chi = 5.0
    assert [first.chi, second.chi, host.chi] == [5.0] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("chi", [2.0, 8.0])
def test_device_delay_on_a_gpu(chi):
    matrix = torch.rand(2048, 2048, device="cuda")
    delay = DeviceDelay(CudaDevice())

    def device_s(num_products):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(num_products):
            delay.begins()
            matrix @ matrix
            delay.ends("square")
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    device_s(20)
    plain_s = device_s(200)
    delay.chi = chi
    device_s(20)
    assert device_s(200) / plain_s == pytest.approx(chi, rel=0.1)


@pytest.mark.gpu
def test_slow_ops_on_a_gpu_reach_backward():
    layer = nn.Linear(2048, 2048, device="cuda")
    x = torch.rand(2048, 2048, device="cuda", requires_grad=True)
    slow = SlowOps()
    with slow:
        slow.chi = 2.0
        layer(x).sum().backward()
        torch.cuda.synchronize()
    assert slow.num_products == 3
    assert slow.seconds_added > 0


# ---- balanced layers ----------------------------------------------------------------------------------------------


def test_delay_comes_after_each_product_and_before_its_collective(run_ranks):
    def recorded(rank, group, scope):
        log = []
        fake = FakeTime()

        def multiplied(multiply, *operands):
            fake.now_s += 1e-3
            log.append("gemm")
            return multiply(*operands)

        def logged(name, function):
            def call(*operands, **options):
                log.append(name)
                return function(*operands, **options)

            return call

        def logged_kernel(name, kernel):
            def call(*operands):
                fake.now_s += 2e-3  # gathers
                result = kernel(*operands[:-1], lambda *x: operands[-1](multiplied, *x))
                log.append(name)
                return result

            return call

        for name in ("forward", "dgrad", "wgrad"):
            setattr(functional.kernels, name, logged_kernel(name, getattr(functional.kernels, name)))
        functional.start_all_reduce = logged("start", functional.start_all_reduce)
        dist.all_reduce = logged("all-reduce", dist.all_reduce)
        delays = Delays(HostDelay(clock=fake.clock, sleep=logged("delay", fake.sleep)))
        delays.chi = 2.0
        model = mlp(group)
        with SlowLayers([model[0], model[2]], scope, delays):
            train_step(model)
        assert fake.sleeps == pytest.approx([1e-3] * 6 if scope == "gemm" else [2e-3, 1e-3] * 6)
        return log

    def slowed(name, scope):
        multiplied = ["gemm", "delay", name]
        return multiplied if scope == "gemm" else ["delay", *multiplied]  # what was gathered, before it is multiplied

    for scope in ("gemm", "all"):
        expected = [
            *slowed("forward", scope),
            *slowed("forward", scope),
            "all-reduce",
            *slowed("dgrad", scope),
            *slowed("wgrad", scope),
            *slowed("dgrad", scope),
            "start",
            "all-reduce",
            *slowed("wgrad", scope),
        ]
        assert run_ranks(recorded, 2, scope) == [expected] * 2


@pytest.mark.parametrize("num_tokens", [64, 2048])  # products of about 0.3 and 10 ms
def test_real_products_take_chi_times_as_long(run_ranks, num_tokens):
    def ratio(rank, group):
        layer = ColumnParallelLinear(512, 512, process_group=group)
        inside, outside = Recorder(), Recorder()
        layer.probes.add_outermost(outside)
        with StragglerInjector(layer, process_group=group, chi={0: 3.0}) as injector:
            layer.probes.add_innermost(inside)
            for _ in range(32768 // num_tokens // 4):
                train_step(layer, 512, num_tokens)
        assert injector.num_products == 3 * (32768 // num_tokens // 4)
        return outside.gemm_s / inside.gemm_s

    assert run_ranks(ratio, 1) == [pytest.approx(3.0, rel=0.15)]


def test_only_stragglers_are_slowed_and_results_stay_bitwise(run_ranks):
    def products(rank, group):
        model = mlp(group)
        expected = train_step(model)
        with StragglerInjector(model, process_group=group, chi={1: 2.0, 2: 0}) as injector:
            assert torch.equal(train_step(model), expected)
            assert injector.chi == {1: 2.0, 2: 1.0}
        return injector.num_products

    assert run_ranks(products, 4) == [0, 6, 0, 0]


def test_set_chi_and_round_robin_while_running(run_ranks):
    def products(rank, group):
        model = mlp(group)
        counts = []

        def count(injector):
            before = injector.num_products
            train_step(model)
            counts.append(injector.num_products - before)

        with StragglerInjector(model, process_group=group, schedule=round_robin(chi=2.0)) as injector:
            for epoch in range(3):
                injector.set_epoch(epoch)
                assert injector.chi == {epoch % 2: 2.0}
                count(injector)
            injector.set_chi({})
            count(injector)
            injector.set_chi({0: 2.0, 1: 1.5})
            count(injector)
            with pytest.raises(ValueError, match="rank 2"):
                injector.set_chi({2: 2.0})
            assert injector.chi == {0: 2.0, 1: 1.5}
        return counts

    assert run_ranks(products, 2) == [[6, 0, 6, 0, 6], [0, 6, 0, 0, 6]]


def test_without_a_schedule_epochs_change_nothing(run_ranks):
    def chi(rank, group):
        with StragglerInjector(mlp(group), process_group=group, chi={0: 2.0}) as injector:
            injector.set_chi({0: 4.0})
            injector.set_epoch(1)
            return injector.chi

    assert run_ranks(chi, 1) == [{0: 4.0}]


def test_products_of_evaluation_are_slowed(run_ranks):
    def products(rank, group):
        model = mlp(group).eval()
        with StragglerInjector(model, process_group=group, chi={0: 2.0}) as injector, torch.no_grad():
            model(torch.ones(4, 8))
        return injector.num_products

    assert run_ranks(products, 1) == [2]


def test_exit_leaves_the_layers_as_they_were(run_ranks):
    def check(rank, group):
        model = mlp(group)
        layers = [module for module in model.modules() if isinstance(module, BalancedLinear)]
        observer = Recorder()
        layers[0].probes.add_outermost(observer)
        before = [layer.probes._probes for layer in layers]
        injector = StragglerInjector(model, process_group=group, chi={0: 2.0})
        with pytest.raises(KeyError), injector:
            assert [layer.probes._probes for layer in layers] != before
            with pytest.raises(RuntimeError, match="active already"):
                injector.__enter__()
            raise KeyError
        assert [layer.probes._probes for layer in layers] == before
        train_step(model)
        assert injector.num_products == 0
        with injector:  # it can be used again
            train_step(model)
        assert injector.num_products == 6

    run_ranks(check, 1)


# ---- any other model ----------------------------------------------------------------------------------------------


def slowed_ops(run, scope="gemm"):
    slow = SlowOps(scope=scope)
    with slow:
        slow.chi = 1.001
        run()
    return slow.num_products


def test_plain_linear_is_slowed_forward_and_backward():
    layer, x = nn.Linear(8, 4), torch.randn(2, 3, 8, requires_grad=True)
    y = layer(x)
    assert slowed_ops(lambda: layer(x)) == 1
    assert slowed_ops(lambda: y.sum().backward()) == 2


def test_every_way_torch_multiplies_by_a_weight_counts_and_attention_does_not():
    x, weight = torch.randn(4, 5, 8), torch.randn(8, 8)
    strided = torch.randn(5, 4, 8).transpose(0, 1)
    heads = torch.randn(2, 4, 5, 8)
    assert slowed_ops(lambda: strided.matmul(weight)) == 1  # which torch carries out as a batched product
    assert slowed_ops(lambda: torch.bmm(x, x.transpose(1, 2))) == 0
    assert slowed_ops(lambda: nn.functional.scaled_dot_product_attention(heads, heads, heads)) == 0
    assert slowed_ops(lambda: heads @ heads.transpose(2, 3)) == 0
    with torch.inference_mode():
        assert slowed_ops(lambda: nn.functional.linear(x, weight)) == 1
        assert slowed_ops(lambda: x @ weight) == 1
        assert slowed_ops(lambda: x @ x.transpose(1, 2)) == 0


def test_parameters_pass_and_of_subclasses_the_ops_inside_count():
    weight = nn.Parameter(torch.ones(2, 2))
    assert slowed_ops(lambda: weight.data @ weight.data) == 1
    pair = TwoTensor(torch.ones(2, 2), torch.ones(2, 2))
    assert slowed_ops(lambda: pair @ pair) == 2


def test_scope_all_slows_every_op_but_views_and_collectives(run_ranks):
    def count(rank, group):
        x = torch.ones(4)
        return [
            slowed_ops(lambda: x.add(1).mul(2), scope="all"),
            slowed_ops(lambda: x.view(2, 2), scope="all"),
            slowed_ops(lambda: dist.all_reduce(x, group=group), scope="all"),
            slowed_ops(lambda: dist.all_reduce(x, group=group, async_op=True).wait(), scope="all"),
        ]

    assert run_ranks(count, 2) == [[2, 0, 0, 0]] * 2


def test_plain_linear_takes_chi_times_as_long(run_ranks):
    def ratio(rank, group):
        model, x = nn.Linear(1024, 1024), torch.randn(512, 1024)
        with StragglerInjector(model, process_group=group, chi={0: 4.0}) as injector:
            begin_s = time.perf_counter()
            for _ in range(10):
                model(x)
            total_s = time.perf_counter() - begin_s
        return total_s / (total_s - injector.seconds_added)

    assert run_ranks(ratio, 1) == [pytest.approx(4.0, rel=0.15)]


def test_rank_that_is_not_slow_does_not_watch_its_ops(run_ranks):
    def num_modes(rank, group):
        counts = []
        with StragglerInjector(nn.Linear(2, 2), process_group=group, schedule=round_robin()) as injector:
            for epoch in range(3):
                injector.set_epoch(epoch)
                counts.append(len(_get_current_dispatch_mode_stack()))
        return [*counts, len(_get_current_dispatch_mode_stack())]

    assert run_ranks(num_modes, 2) == [[1, 0, 1, 0], [0, 1, 0, 0]]


def test_other_modes_keep_their_turn():
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 2)
    slow = SlowOps()
    with slow:
        slow.chi = 2.0
        with Other() as other:
            slow.chi = 1.0  # stays on the stack below the other, doing nothing
            x @ x
            assert slow.num_products == 0
            slow.chi = 2.0
            x @ x
            assert slow.num_products == 1
            assert _get_current_dispatch_mode_stack()[-1] is other
        slow.chi = 1.0
        assert _get_current_dispatch_mode_stack() == []
        with Other(), pytest.raises(RuntimeError, match="outside that"):
            slow.chi = 2.0
    assert _get_current_dispatch_mode_stack() == []


def test_unknown_scope_of_slow_ops():
    with pytest.raises(ValueError, match="scope='some'"):
        SlowOps(scope="some")


def test_colossalai_layer_is_slowed_before_its_all_reduce(run_ranks, colossalai_module):
    def recorded(rank, group):
        from colossalai.shardformer.layer import Linear1D_Col

        from zeroresize.integrations.colossalai import prepare_accelerator

        prepare_accelerator()
        layer = Linear1D_Col.from_native_module(nn.Linear(8, 8), process_group=group)
        x = torch.ones(4, 8, requires_grad=True)
        log = []
        all_reduce = dist.all_reduce
        with StragglerInjector(layer, process_group=group, chi={0: 1.5, 1: 1.5}) as injector:

            def logged(*operands, **options):
                log.append(injector.num_products)
                return all_reduce(*operands, **options)

            dist.all_reduce = logged
            layer(x).sum().backward()
        return log, injector.num_products

    assert run_ranks(recorded, 2) == [([2], 3)] * 2
