"""watch(): who is slow on real ranks, under whatever shards the model, and that nothing else changes."""

import gc
import itertools
import time
import types
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.processes import caught_log_lines, for_each
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zeroresize as zr
from zeroresize import watching
from zeroresize.measure import clocks, model_steps, waits
from zeroresize.measure.model_steps import ModelSteps
from zeroresize.policy.slowness import windows
from zeroresize.utils.torch_private import hooks_of

HIDDEN = 8


class Sleepy(nn.Linear):
    """A product that sleeps as long as it is told to."""

    seconds = 0.001

    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = Sleepy(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def ddp(model, group):
    return DistributedDataParallel(model, process_group=group)


def fsdp2(model, group):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def dtensor(model, group):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def train(model, optimizer, num_steps):
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    for _ in range(num_steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_a_slow_rank_is_seen_whatever_shards_the_model(run_ranks):
    """The others wait for it, and that is not taken for work."""

    @for_each([(ddp,), (fsdp2,), (dtensor,)])
    def run(rank, group, shard):
        model = shard(Model(), group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        Sleepy.seconds = 0.001
        with patch.object(windows, "_SHARE", 1.0), zr.watch(model, optimizer, update_every=5) as watch:
            train(model, optimizer, 20)
            Sleepy.seconds = 0.03 if rank == 1 else 0.001
            train(model, optimizer, 30)
            return watch.report(), watch.scores, watch.metrics()

    for cases in run_ranks(run, 2, timeout_s=100):
        for report, scores, metrics in cases:
            (slow,) = report.slow  # whatever other work on the machine did to a rank before is over
            assert slow.rank == 1 and slow.cause == "products"
            assert slow.times > 1.4 and scores[0] == 1.0 and scores[1] < 0.7
            assert report.cost_s > 0.2
            assert metrics["watch/num_slow"] == 1.0


def listen_to_all(watch):
    """Let listening cost nothing, which takes real time where a step takes time of another clock."""
    if watch._slowness is not None:
        watch._slowness.count_cost = lambda seconds: None


class Virtual:
    """Training whose time passes only as it says, in this process."""

    def __init__(self, group, listens_to_all=True, **watch_options):
        self.now, self.rank = 0.0, dist.get_rank(group)
        clocks.time = types.SimpleNamespace(perf_counter=lambda: self.now)
        torch.manual_seed(0)
        virtual = self

        class Product(nn.Linear):
            def forward(self, x):
                virtual.now += 0.1 * virtual.chi
                return super().forward(x)

        self.chi, self.host_s, self.loader_s = 1.0, 0.2, 0.1
        self.model = nn.Sequential(Product(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.x = torch.randn(4, HIDDEN)
        self.group = group
        self.watch = zr.watch(self.model, self.optimizer, process_group=group, **{"update_every": 5, **watch_options})
        if listens_to_all:
            listen_to_all(self.watch)

    def forward_and_backward(self):
        self.now += self.loader_s
        loss = self.model(self.x).square().mean()
        self.now += 0.2 * self.chi + self.host_s
        loss.backward()

    def step(self):
        self.forward_and_backward()
        self.sum_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sum_gradients(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.group)

    def steps(self, number):
        for _ in range(number):
            self.step()
        self.wait()

    def wait(self):
        """Until what was sent has come: a step of this training takes hardly any real time."""
        deadline = time.monotonic() + 20.0
        while not all(each.has_ended for each in self.watch._slowness._pending) and time.monotonic() < deadline:
            time.sleep(0.001)


@pytest.mark.slow
def test_a_slow_rank_is_seen_where_the_model_is_compiled(run_ranks):
    """Its modules are not called one by one, so that products and the rest are one."""

    @for_each([("loader",), ("compute",)])
    def run(rank, group, cause):
        virtual = Virtual(group)
        virtual.model = torch.compile(DistributedDataParallel(Model(), process_group=group), backend="aot_eager")
        Sleepy.seconds = 0.0
        virtual.optimizer = torch.optim.SGD(virtual.model.parameters(), lr=0.01)
        virtual.watch.close()
        virtual.watch = zr.watch(virtual.model, virtual.optimizer, process_group=group, update_every=5)
        listen_to_all(virtual.watch)
        virtual.steps(30)
        virtual.chi = 4.0 if rank == 1 and cause == "compute" else 1.0
        virtual.loader_s = 0.7 if rank == 1 and cause == "loader" else 0.1
        virtual.steps(40)
        (slow,) = virtual.watch.report().slow
        assert (slow.rank, slow.cause, slow.since_step) == (1, cause, 30)
        assert slow.times == pytest.approx(1.1 / 0.5)

    run_ranks(run, 2, timeout_s=100)


def test_beginning_change_and_end_are_a_line_each_on_one_rank(run_ranks):
    def run(rank, group):
        statuses, reports = [], []
        with caught_log_lines() as lines:
            virtual = Virtual(group, on_status=statuses.append)
            slowness = virtual.watch._slowness._group
            report = slowness.report
            slowness.report = lambda: reports.append(report()) or reports[-1]
            virtual.steps(50)
            assert len(reports) == len(statuses)
            virtual.chi = 2.0 if rank == 1 else 1.0
            virtual.steps(50)
            assert len(reports) == len(statuses)  # at an event, too, what may be many ranks' medians is taken once
            in_between = virtual.watch.report()
            virtual.chi = 4.0 if rank == 1 else 1.0
            virtual.steps(50)
            virtual.chi = 1.0
            virtual.steps(60)
        return [line for line in lines if "step " in line], in_between, virtual.watch.report()

    (lines, in_between, after), *others = run_ranks(run, 2)
    assert all(not lines_there for lines_there, _, _ in others)
    assert all(report.cost_s == pytest.approx(after.cost_s) for _, _, report in others)
    begins, changes, ends = lines
    assert "rank 1 is 1.50 times slower than the others, since step 50" in begins and len(begins) <= 200
    assert "matrix products take longer" in begins
    assert "rank 1 is 2.50 times slower than the others now, 1.50 times before" in changes
    assert "rank 1 is as fast as the others again: it was 2.50 times slower, from step 50 on" in ends
    (slow,) = in_between.slow
    assert (slow.rank, slow.cause, slow.since_step) == (1, "products", 50)
    assert after.slow == ()
    assert after.cost_s == pytest.approx(50 * 0.3 + 50 * 0.9, rel=0.2)


def test_times_for_as_much_work_are_compared_where_the_user_counts_it(run_ranks):
    def run(rank, group):
        virtual = Virtual(group)
        virtual.watch.close()
        virtual.host_s = virtual.loader_s = 0.0  # all of a step grows with its rows
        reports = []
        for counts in ("step", "parts", ""):
            optimizer = virtual.optimizer if counts == "parts" else None
            virtual.watch = zr.watch(virtual.model, optimizer, process_group=group, update_every=5)
            with caught_log_lines() as lines:
                for number in range(60):
                    virtual.chi = 2.0 if rank == 1 and number >= 20 else 1.0
                    if counts == "parts":
                        virtual.watch.count(400 * virtual.chi)
                    virtual.forward_and_backward()
                    virtual.sum_gradients()  # or a rank is many steps ahead, and what it sends is not there in time
                    if counts == "parts":
                        virtual.watch.count(torch.tensor(600 * virtual.chi))
                    virtual.optimizer.step()
                    if counts != "parts":
                        virtual.watch.step(work=torch.tensor(1000 * virtual.chi) if counts else None)
            reports.append((virtual.watch.report().slow, [line for line in lines if "slower than" in line]))
            with pytest.raises(ValueError, match=r"work=-1 is not allowed"):
                virtual.watch.count(-1)
            virtual.watch.close()
        for call in (virtual.watch.step, lambda: virtual.watch.count(1)):
            with pytest.raises(RuntimeError, match="this watch is closed"):
                call()
        with pytest.raises(RuntimeError, match=r"step\(\) is for watches without an optimizer"):
            zr.watch(virtual.model, virtual.optimizer, process_group=group).step()
        return reports

    for rank, (*all_counted, (plain, lines)) in enumerate(run_ranks(run, 2, timeout_s=60)):
        assert all_counted == [((), []), ((), [])]
        assert [slow.rank for slow in plain] == [1]
        assert len(lines) == (rank == 0) and all("or it has more work" in line for line in lines)


class Unread(torch.Tensor):
    """A number that must not be asked for, which would wait for its device."""

    def item(self):
        raise AssertionError("a step that nobody listens to has read a tensor")


def test_all_ranks_listen_to_the_same_few_steps_and_tell_of_all(run_ranks):
    """Though their own steps differ. In the others hooks do nothing."""

    def run(rank, group):
        heard, calls, reports = [], [], []
        work_begins = ModelSteps._work_begins
        with (
            patch.object(windows, "_SHARE", 1e-9),
            patch.object(windows, "_MOST_STRIDE", 6),
            patch.object(ModelSteps, "_work_begins", lambda *given: calls.append(len(heard)) or work_begins(*given)),
            caught_log_lines() as lines,
        ):
            virtual = Virtual(group, listens_to_all=False)
            steps = virtual.watch._steps
            for number in range(900):
                virtual.chi = 2.0 if rank == 1 and 450 <= number < 700 else 1.0
                if steps.listens:
                    heard.append(number)
                assert steps.listens == any(reference() is steps._timer for reference in waits._listeners)
                virtual.watch.count(0.6 if steps.listens else torch.ones(()).as_subclass(Unread))
                virtual.step()
                virtual.wait()  # a step takes hardly any real time, so it might end before what was sent has come
                reports.append(virtual.watch.report())
        assert calls == list(range(1, len(heard) + 1))
        return heard, reports, [line for line in lines if "step " in line]

    (heard, reports, (begins, *_, ends)), (others_heard, others_reports, _) = run_ranks(run, 2, timeout_s=60)
    assert heard == others_heard and heard[:20] == list(range(20))
    assert sum(100 <= number < 400 for number in heard) == 300 / 6
    assert [report.slow for report in reports] == [report.slow for report in others_reports]
    (slow,) = reports[699].slow
    assert f"since step {slow.since_step}" in begins and 450 - 30 <= slow.since_step <= 450 + 30
    assert slow.since_step + slow.num_steps == reports[699].step > 700 - 30
    assert slow.cost_s == pytest.approx(slow.num_steps * 0.3, rel=0.2)
    assert not any(report.slow for report in reports[:450])
    assert "as fast as the others again" in ends and reports[-1].slow == () and reports[-1].step > 900 - 30


def test_what_others_spend_in_steps_that_are_left_out_is_no_cost_of_a_watch(run_ranks):
    def run(rank, group):
        readings = itertools.count()
        each_takes_1_ms = types.SimpleNamespace(perf_counter=lambda: 0.001 * next(readings))
        with ExitStack() as stack:
            stack.enter_context(patch.object(windows, "_SHARE", 0.02))
            for module in (waits, model_steps, watching):
                stack.enter_context(patch.object(module, "time", each_takes_1_ms))
            virtual = Virtual(group, listens_to_all=False)
            for _ in range(150):
                if not virtual.watch._steps.listens:
                    waits.spent_s += 100.0
                virtual.step()
                virtual.wait()
            return virtual.watch._slowness._sampling._latest

    strides = run_ranks(run, 2, timeout_s=60)
    assert 1 < strides[0] == strides[1] < windows._MOST_STRIDE


@pytest.mark.slow
def test_what_is_unusual_in_training_is_no_slowness(run_ranks):
    @for_each([("evaluation",), ("accumulation",), ("skipped steps",), ("checkpoint of rank 0",)])
    def run(rank, group, unusual):
        virtual = Virtual(group)
        with caught_log_lines() as lines:
            for number in range(150):
                if unusual == "evaluation" and number % 12 == 0 and rank == 0:
                    with torch.no_grad():
                        for _ in range(40):
                            virtual.model(virtual.x)
                if unusual == "accumulation":
                    for _ in range(3 if number % 10 < 5 else 0):  # as at the end of an epoch
                        virtual.forward_and_backward()
                if unusual == "skipped steps" and number % 7 in (0, 1):
                    virtual.forward_and_backward()
                    virtual.optimizer.zero_grad()
                if unusual == "checkpoint of rank 0" and number % 10 == 0 and rank == 0:
                    virtual.now += 60.0
                virtual.step()
            virtual.wait()
        return virtual.watch.report(), lines

    for cases in run_ranks(run, 2, timeout_s=60):
        for report, lines in cases:
            assert report.slow == () and report.cost_s == 0.0 and report.scores
            assert lines == []


def all_hooks(model, optimizer):
    kinds = ("forward", "forward_pre", "backward")
    of_modules = sum(len(hooks_of(module, kind)) for module in model.modules() for kind in kinds)
    return of_modules + sum(len(getattr(optimizer, f"_optimizer_step_{kind}_hooks")) for kind in ("pre", "post"))


def test_a_watch_that_has_ended_leaves_nothing_behind_and_has_changed_nothing(run_ranks):
    @for_each([("close",), ("garbage",)])
    def run(rank, group, ends):
        results = []
        for is_watched in (False, True):
            model = DistributedDataParallel(Model(), process_group=group)
            optimizer = torch.optim.AdamW(model.parameters())
            hooks_before = all_hooks(model, optimizer)
            watch = zr.watch(model, optimizer, update_every=2) if is_watched else None
            train(model, optimizer, 12)
            if watch is not None and ends == "close":
                assert all_hooks(model, optimizer) > hooks_before
                watch.close()
            del watch
            gc.collect()
            assert all_hooks(model, optimizer) == hooks_before
            train(model, optimizer, 2)
            results.append([parameter.detach().clone() for parameter in model.parameters()])
        assert all(map(torch.equal, *results))

    run_ranks(run, 2)


def test_a_rank_that_has_died_or_makes_fewer_steps_holds_up_nobody(run_ranks):
    def run(rank, group):
        model = Model()  # whose ranks exchange nothing
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        watch = zr.watch(model, optimizer, update_every=2)
        train(model, optimizer, 6 if rank == 1 else 40)
        if rank == 0:
            watch.close()  # while the other has not come
        dist.barrier()
        watch.close()
        return True

    assert run_ranks(run, 2, timeout_s=20) == [True, True]

    def leave(rank, group):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        watch = zr.watch(model, optimizer, update_every=2)
        train(model, optimizer, 6)
        dist.barrier()
        if rank == 1:
            watch.close()  # as where its process ends
            return []
        with caught_log_lines() as lines:
            for _ in range(200):
                train(model, optimizer, 2)
                if goodbyes(lines):
                    break
                time.sleep(0.01)
            train(model, optimizer, 20)
        return goodbyes(lines)

    def goodbyes(lines):  # a busy machine may make a rank slow, which is said as well
        return [line for line in lines if "slow ranks are not watched any more" in line]

    (lines, _) = run_ranks(leave, 2, timeout_s=60)
    assert len(lines) == 1


def test_wrong_arguments_are_said_on_every_rank(run_ranks):
    def run(rank, group):
        model, errors = Model(), []
        for options in ({"update_every": 0}, {"tolerance": -1.0}, {"optimizer": "SGD"}, {"optimizer": []}):
            with pytest.raises(ValueError) as error:
                zr.watch(model, **options)
            errors.append(str(error.value))
        with pytest.raises(ValueError, match="model='model' is not allowed"):
            zr.watch("model")
        with pytest.raises(ValueError, match="do not agree on update_every of"):
            zr.watch(model, update_every=5 + rank)
        with pytest.raises((ValueError, RuntimeError)):  # one rank alone: the other does not wait for the time limit
            zr.watch(model, update_every=5 if rank else 0)
        return errors

    for update_every, tolerance, optimizer, optimizers in run_ranks(run, 2, timeout_s=30):
        assert update_every.startswith("watch: update_every=0 is not allowed")
        assert tolerance.startswith("watch: tolerance=-1.0 is not allowed")
        assert optimizer.startswith("watch: optimizer=str is no torch.optim.Optimizer")
        assert optimizers.startswith("watch: optimizer=list is no torch.optim.Optimizer")


def test_alone_there_is_nothing_to_watch():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zr.watch(model, optimizer) as watch:
        train(model, optimizer, 1)
        assert watch.report().slow == () and watch.scores == (1.0,) and watch.metrics() == {}
        assert all_hooks(model, optimizer) == 0
