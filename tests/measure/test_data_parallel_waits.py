"""Beside data parallelism: waits for other replicas, inside DDP's C++ code, are waits and no work."""

import statistics
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zeroresize as zr
from zeroresize.measure import waits
from zeroresize.measure.clocks import HostClock
from zeroresize.measure.step_timer import StepTimer

pytestmark = pytest.mark.slow

HIDDEN = 64
BUSY_S = 0.05


class Listener:
    """Sums what it is told of waits."""

    def __init__(self):
        self.waited_s, self.num_waits = 0.0, 0

    def wait_begins(self):
        self._began = time.perf_counter()

    def wait_ends(self):
        self.waited_s += time.perf_counter() - self._began
        self.num_waits += 1

    def backward_ends(self):
        """It counts waits only."""


def backward_that_ends_with(callback):
    """Queues ``callback`` as DDP's reducer does: with the last gradient, so after the layers' products."""
    w = torch.ones(3, requires_grad=True)
    w.register_post_accumulate_grad_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(callback))
    product = w * 2.0
    product.register_hook(lambda _: waits.watch_end_of_backward())
    product.sum().backward()


def test_what_ends_a_backward_is_one_wait_also_a_collective_and_after_a_backward_that_failed():
    def fail():
        raise RuntimeError("a replica has died")

    listener = Listener()
    waits.listen(listener)
    waits.watch_end_of_backward()
    assert listener.num_waits == 0, "outside of a backward there is no end to watch"
    for number, sleep in enumerate((time.sleep, waits._watched(time.sleep)), start=1):
        before_s = listener.waited_s
        backward_that_ends_with(lambda sleep=sleep: sleep(BUSY_S))
        assert listener.num_waits == number and listener.waited_s - before_s >= BUSY_S
    with pytest.raises(RuntimeError, match="a replica has died"):
        backward_that_ends_with(fail)
    before_s = listener.waited_s
    backward_that_ends_with(lambda: time.sleep(BUSY_S))
    assert listener.waited_s - before_s >= BUSY_S
    waits.stop_listening(listener)


class Block(nn.Module):
    def __init__(self, process_group, is_checkpointed):
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.up = zr.ColumnParallelLinear.from_linear(nn.Linear(HIDDEN, 4 * HIDDEN), process_group=process_group)
        self.down = zr.RowParallelLinear.from_linear(nn.Linear(4 * HIDDEN, HIDDEN), process_group=process_group)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        # Reentrant: its backward is a backward of its own within the one that DDP sees the end of.
        return checkpoint(self.compute, x, use_reentrant=True) if self.is_checkpointed else self.compute(x)

    def compute(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.few(1)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_replica_of_a_straggler_is_not_taken_for_busy(run_ranks, is_checkpointed):
    """TP {0, 1} and {2, 3}, DDP {0, 2} and {1, 3}; rank 1 is slow, and all others wait for it, each in its own way."""

    def steps(rank, world):
        tensor_parallel = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, HIDDEN), *(Block(tensor_parallel, is_checkpointed) for _ in range(2)))
        config = zr.BalanceConfig(mode="off", update_every=6)
        zr.convert(model, process_group=tensor_parallel)
        replicated = DistributedDataParallel(model, process_group=replicas)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        records = []
        balancer = zr.Balancer(
            replicated, optimizer, process_group=tensor_parallel, config=config, on_update=records.append
        )
        with zr.StragglerInjector(model, process_group=tensor_parallel, chi={1: 100.0} if rank < 2 else {}):
            for _ in range(24):
                replicated(torch.randn(32, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                balancer.step()
        return statistics.median(record.busy_s for record in records)

    busy_s = run_ranks(steps, 4, timeout_s=60)
    for rank in (0, 2, 3):
        assert busy_s[rank] < busy_s[1] / 2, f"rank {rank} only waited for rank 1: {busy_s}"


def test_a_broadcast_of_buffers_is_a_wait(run_ranks):
    """Rank 0 comes late to DDP's forward, in which its buffers go to the other replica."""

    def waited_s(rank, group):
        timer = StepTimer(HostClock())
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), process_group=group)
        model(torch.randn(8, 4)).sum().backward()
        model(torch.randn(8, 4)).sum().backward()  # in the second forward DDP arranges its buckets anew
        dist.barrier(group)
        timer.begin_step()
        if rank == 0:
            time.sleep(10 * BUSY_S)
        model(torch.randn(8, 4))
        (times,) = timer.end_step()
        return times.wait_s

    assert run_ranks(waited_s, 2, timeout_s=30)[1] >= 5 * BUSY_S
