"""Injected slowness of balanced layers: where delays come, whom they reach, and what they leave behind."""

import time

import pytest
import torch
import torch.distributed as dist
from helpers.on_ranks import on_ranks
from helpers.virtual_training import FakeTime
from torch import nn

from zeroresize.injection import StragglerInjector, round_robin, static
from zeroresize.injection.delay import HostDelay
from zeroresize.injection.schedule import checked_chi
from zeroresize.injection.slow_layers import SlowLayers
from zeroresize.kernels.probe import ProductProbe
from zeroresize.layers import functional
from zeroresize.layers.linear import ColumnParallelLinear, RowParallelLinear


class Recorder(ProductProbe):
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


@on_ranks(1)
def test_wrong_arguments_are_named(rank, group):
    model = mlp(group)
    for arguments, message in [
        ({"process_group": None, "chi": {0: 2.0}}, "process_group=None"),
        ({}, "chi=None, schedule=None: exactly one"),
        ({"chi": {0: 2.0}, "schedule": round_robin()}, "exactly one"),
        ({"chi": {1: 2.0}}, "rank 1"),
        ({"schedule": static({3: 2.0})}, "rank 3"),
        ({"chi": {0: 2.0}, "scope": "half"}, r"scope='half' is not allowed: choose one of \['gemm', 'all'\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            StragglerInjector(model, **{"process_group": group, **arguments})
    for empty in (nn.Sequential(nn.LayerNorm(4), nn.GELU()), nn.Embedding(4, 4)):
        with pytest.raises(ValueError, match="no linear layers"):
            StragglerInjector(empty, process_group=group, chi={0: 2.0})


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
        host = HostDelay(clock=fake.clock, sleep=logged("delay", fake.sleep))
        model = mlp(group)
        slow = SlowLayers([model[0], model[2]], scope, host)
        slow.chi = 2.0
        with slow:
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


@on_ranks(1)
def test_real_products_take_chi_times_as_long(rank, group):
    num_tokens = 512
    layer = ColumnParallelLinear(512, 512, process_group=group)
    inside, outside = Recorder(), Recorder()
    layer.probes.add_outermost(outside)
    with StragglerInjector(layer, process_group=group, chi={0: 3.0}) as injector:
        layer.probes.add_innermost(inside)
        for _ in range(12):
            train_step(layer, 512, num_tokens)
    assert injector.num_products == 3 * 12
    assert outside.gemm_s / inside.gemm_s == pytest.approx(3.0, rel=0.15)


def test_only_stragglers_are_slowed_as_chi_or_a_schedule_says_and_results_stay_bitwise(run_ranks):
    def check(rank, group):
        model, counts = mlp(group), []
        expected = train_step(model)

        def count(injector):
            before = injector.num_products
            assert torch.equal(train_step(model), expected)
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
        with StragglerInjector(model, process_group=group, chi={1: 2.0, 0: 0}) as injector:
            count(injector)
            injector.set_epoch(1)  # which changes nothing without a schedule
            assert injector.chi == {1: 2.0, 0: 1.0}
            model.eval()(torch.ones(4, 8))
            counts.append(injector.num_products)
        return counts

    assert run_ranks(check, 2) == [[6, 0, 6, 0, 6, 0, 0], [0, 6, 0, 0, 6, 6, 8]]


@on_ranks(1)
def test_exit_leaves_the_layers_as_they_were(rank, group):
    model = mlp(group)
    injector = StragglerInjector(model, process_group=group, chi={0: 2.0})
    with pytest.raises(KeyError), injector:
        with pytest.raises(RuntimeError, match="active already"):
            injector.__enter__()
        raise KeyError
    train_step(model)
    assert injector.num_products == 0
    with injector:  # it can be used again
        train_step(model)
    assert injector.num_products == 6


def test_schedules_say_who_is_slow_and_wrong_chi_is_named():
    schedule = round_robin(chi=3.0)
    assert [schedule(epoch, 3) for epoch in range(4)] == [{0: 3.0}, {1: 3.0}, {2: 3.0}, {0: 3.0}]
    assert static({0: 8, 1: 6})(5, 2) == {0: 8, 1: 6}
    assert checked_chi({0: 0, 1: 2.5}, 2) == {0: 1.0, 1: 2.5}  # 0 means 1
    for chi, message in [
        ({2: 4.0}, r"chi=\{2: 4.0\}: rank 2 .* allowed are 0 to 1"),
        ({"0": 4.0}, "rank '0'"),
        ({0: 0.5}, r"chi=\{0: 0.5\} is not allowed.*at least 1"),
        ({0: float("nan")}, "finite"),
        ({0: True}, "finite"),
        (4.0, "mapping of rank to χ"),
    ]:
        with pytest.raises(ValueError, match=message):
            checked_chi(chi, 2)
