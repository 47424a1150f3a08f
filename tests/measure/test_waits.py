"""Where a wait is: in whose collectives, or for which rank; and that listeners may come and go."""

import gc

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zeroresize.measure import waits
from zeroresize.measure.clocks import CpuClock
from zeroresize.measure.model_steps import ModelSteps
from zeroresize.measure.step_timer import StepTimer


def test_each_wait_is_that_of_its_group_or_for_its_peer(run_ranks):
    def run(rank, group):
        dp, pair, x = dist.new_group([0, 1], group_desc="mesh_dp"), dist.new_group([0, 1]), torch.ones(4)
        timer = StepTimer(CpuClock())

        def places(call):
            timer.begin_step()
            call()
            timer.end_step()
            return [str(waits.place_of(where)) for where in timer.waits[0]]

        started = []
        return [
            places(lambda: dist.all_reduce(x)),
            places(lambda: dist.all_reduce(x, group=dp)),
            places(lambda: dist.all_gather([torch.empty(4), torch.empty(4)], x, group=pair)),
            places(lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0)),
            places(lambda: started.append(dist.broadcast(x, 0, group=pair, async_op=True))),
            places(lambda: started.pop().wait()),
        ]

    for rank, (default, mesh, pair, peer, begin, end) in enumerate(run_ranks(run, 2)):
        assert default == ["collectives of all ranks"] and mesh == ["collectives of group dp"]
        assert pair == begin == end == ["collectives of ranks 0, 1"]
        assert peer == [f"rank {1 - rank} of the job"]
    assert str(waits.place_of(("gone", None))) == str(waits.place_of(None)) == "collectives"


def test_what_the_reducer_waits_for_is_of_the_models_group(run_ranks):
    def run(rank, group):
        model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
        steps = ModelSteps(model)
        model(torch.randn(2, 4)).sum().backward()
        (step,) = steps.end_step()
        return (
            [str(waits.place_of(where)) for where in step.waits_s],
            step.inputs,
            sum(step.waits_s.values()),
            step.wait_s,
        )

    for places, inputs, waits_s, wait_s in run_ranks(run, 2):
        assert places == ["collectives of all ranks"] and inputs == 8.0
        assert 0.0 < waits_s <= 1.001 * wait_s


def test_listeners_come_and_go():
    first, second = StepTimer(CpuClock()), StepTimer(CpuClock())
    heard = lambda: [reference() for reference in waits._listeners]  # noqa: E731
    assert heard()[-2:] == [first, second]
    first.close()
    assert heard()[-1:] == [second] and first not in heard()
    del second
    gc.collect()
    assert None not in heard()


def test_collectives_that_nobody_waits_for_are_forgotten(run_ranks):
    """Else a later one, in a group of which nothing is known, would be taken for one of theirs."""

    def run(rank, group):
        timer, x = StepTimer(CpuClock()), torch.ones(1)
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(3)]
        assert len(waits._started) == 3
        works.pop().wait()
        assert len(waits._started) == 2
        while not all(work.is_completed() for work in works):
            pass
        works.clear()
        gc.collect()
        timer.close()
        return len(waits._started)

    assert run_ranks(run, 2) == [0, 0]


def test_what_others_wait_for_than_the_reducer_is_not_of_its_group(run_ranks):
    def run(rank, group):
        model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
        steps = ModelSteps(model)
        model(funcol.wait_tensor(funcol.all_reduce(torch.ones(2, 4), "sum", group))).sum().backward()
        (step,) = steps.end_step()
        return [str(waits.place_of(where)) for where in step.waits_s]

    assert run_ranks(run, 2) == [["collectives", "collectives of all ranks"]] * 2
