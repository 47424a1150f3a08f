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
from zeroresize.measure.clocks import CpuClock
from zeroresize.measure.step_timer import StepTimer

pytestmark = pytest.mark.slow

HIDDEN = 64
BUSY_S = 0.05


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
        timer = StepTimer(CpuClock())
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
