"""Beside data parallelism units move, too: all replicas own alike, and the slowest replica of each rank counts."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from virtual_training import FEATURES, Pair, Run, keep_time

import zeroresize as zr
from zeroresize.measure import calibration
from zeroresize.policy.cost_model import MigrationCost


@pytest.fixture(autouse=True)
def lending_is_dear(monkeypatch):
    """As virtual time does not count transfers, lending would cost nothing, and moving bring nothing more."""
    monkeypatch.setattr(calibration, "measure_migration_cost", lambda *_: MigrationCost(fixed_s=1e3))


def groups_of(rank):
    """2 × 2 ranks: tensor-parallel [0, 1] and [2, 3], data-parallel [0, 2] and [1, 3]; this rank's."""
    tensor_parallel = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    return tensor_parallel, [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]


class ReplicaRun(Run):
    """One of two replicas in training, with batches of its own.

    Args:
        wraps: in DistributedDataParallel; else gradients are averaged by hand.
        tells: the balancer its data-parallel group.
    """

    def __init__(self, groups, *, wraps=True, tells=False, **config):
        group, replicas = groups
        config = {"mode": "exact", "update_every": 4, **config}
        self.config = zr.BalanceConfig(**config)
        self.time = self.make_time()
        self.model = zr.convert(Pair(group), process_group=group, config=self.config)
        keep_time(self.time, (self.model.up, self.model.down))
        self.inner, self.replicas = self.model, replicas
        if wraps:
            self.model = DistributedDataParallel(self.model, process_group=replicas)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if not wraps:
            self.optimizer.register_step_pre_hook(self.average_gradients)
        self.balancer = zr.Balancer(
            self.model,
            self.optimizer,
            process_group=group,
            config=self.config,
            data_parallel_group=replicas if tells else None,
        )
        generator = torch.Generator().manual_seed(1 + dist.get_rank(replicas))
        self.x = torch.randn(8, FEATURES, generator=generator, dtype=torch.get_default_dtype())

    @staticmethod
    def make_time():
        from virtual_training import VirtualTime

        return VirtualTime(0.0)

    def average_gradients(self, *_):
        for parameter in self.inner.parameters():
            dist.all_reduce(parameter.grad, group=self.replicas)
            parameter.grad /= 2.0

    def counts(self):
        """How many neurons every rank owns."""
        return self.inner.down.segment.owned.counts


@pytest.mark.parametrize("how", [{}, {"wraps": False, "tells": True}], ids=["DDP", "told"])
def test_a_straggler_in_one_replica_gives_units_away_in_both_and_gets_them_back(run_ranks, how):
    def train(rank, _):
        torch.set_default_dtype(torch.float64)
        groups = groups_of(rank)
        expected = ReplicaRun(groups, mode="off", **how).steps(104)
        run = ReplicaRun(groups, **how)
        losses = run.steps(8)
        run.time.chi = 4.0 if rank == 3 else 1.0
        losses += run.steps(48)
        away = run.counts()
        run.time.chi = 1.0
        losses += run.steps(48)
        return losses, expected, away, run.counts(), run.balancer.plan.owned

    results = run_ranks(train, 4)
    for losses, expected, away, after, owned in results:
        assert losses == pytest.approx(expected, rel=1e-10)
        assert away == results[0][2] and away[1] < away[0] / 2
        assert after == (96, 96) and owned == (1.0, 1.0)
    assert results[0][0] != results[2][0]  # replicas have other batches
