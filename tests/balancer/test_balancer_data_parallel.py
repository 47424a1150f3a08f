"""Beside data parallelism units move, too: all replicas own alike, and the slowest replica of each rank counts."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.processes import told_by_survivors
from helpers.virtual_training import FEATURES, Pair, Run, VirtualTime, keep_time
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zeroresize as zr

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("lending_is_dear")]


def groups_of(rank, timeout_s=60.0):
    """2 × 2 ranks: tensor-parallel [0, 1] and [2, 3], data-parallel [0, 2] and [1, 3]; this rank's."""
    timeout = timedelta(seconds=timeout_s)
    tensor_parallel = [dist.new_group(ranks, timeout=timeout) for ranks in ([0, 1], [2, 3])][rank // 2]
    return tensor_parallel, [dist.new_group(ranks, timeout=timeout) for ranks in ([0, 2], [1, 3])][rank % 2]


class ReplicaRun(Run):
    """One of two replicas in training, with batches of its own.

    Args:
        wraps: in DistributedDataParallel, or "fully_shard"; else gradients are averaged by hand.
        tells: the balancer its data-parallel group; or another group.
    """

    def __init__(self, groups, *, wraps=True, tells=False, **config):
        group, replicas = groups
        config = {"mode": "exact", "update_every": 4, **config}
        self.config = zr.BalanceConfig(**config)
        self.time = VirtualTime(0.0)
        self.model = zr.convert(Pair(group), process_group=group)
        keep_time(self.time, (self.model.up, self.model.down))
        self.inner, self.replicas, self.wraps = self.model, replicas, wraps
        if wraps == "fully_shard":
            fully_shard(self.model, mesh=DeviceMesh.from_group(replicas, "cpu"))
        elif wraps:
            self.model = DistributedDataParallel(self.model, process_group=replicas)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.balancer = zr.Balancer(
            self.model,
            self.optimizer,
            process_group=group,
            config=self.config,
            data_parallel_group=replicas if tells is True else tells or None,
        )
        generator = torch.Generator().manual_seed(1 + dist.get_rank(replicas))
        self.x = torch.randn(8, FEATURES, generator=generator, dtype=torch.get_default_dtype())

    def reduce_gradients(self):
        if self.wraps:
            return
        for parameter in self.inner.parameters():
            dist.all_reduce(parameter.grad, group=self.replicas)
            parameter.grad /= 2.0

    def counts(self):
        """How many neurons every rank owns."""
        return self.inner.down.segment.owned.counts


@pytest.mark.parametrize(
    "how", [{}, {"wraps": False, "tells": True}, {"wraps": "fully_shard"}], ids=["DDP", "told", "FSDP2"]
)
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


def test_groups_that_make_no_replicas_are_errors(run_ranks):
    def train(rank, _):
        group, replicas = groups_of(rank)
        crossed = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])][int(rank in (1, 2))]
        messages = []
        for other, wraps in ((group, False), (crossed, False), (crossed, True)):
            with pytest.raises(ValueError, match=r"data_parallel_group|data-parallel groups") as caught:
                ReplicaRun((group, replicas), wraps=wraps, tells=other)
            messages.append(str(caught.value))
        return messages

    for in_group, crossed, other_than_ddp in run_ranks(train, 4):
        assert "different shards" in in_group
        assert "make no whole replicas" in crossed
        assert "averages over" in other_than_ddp


@pytest.mark.parametrize(("when", "wraps"), [("before", True), ("while", True), ("while", "fully_shard")])
def test_a_rank_that_dies_in_another_replica_leaves_nobody_waiting_and_nothing_moved(
    tmp_path, monkeypatch, when, wraps
):
    """Rank 3 dies before it comes to a move, or while units are on their way."""
    from zeroresize.resharding import transport

    def train(rank, _):
        run = ReplicaRun(groups_of(rank, timeout_s=5.0), mode="off", wraps=wraps)
        run.steps(1)
        if rank == 3:
            if when == "while":
                monkeypatch.setattr(transport, "start_messages", lambda *_: os._exit(0))
                run.balancer.move((1, 3))
            os._exit(0)
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            run.balancer.move((1, 3))
        took_s = time.monotonic() - began
        owns = run.counts() == (96, 96) and tuple(run.inner.up.weight.shape) == (96, FEATURES)
        return f"{owns} {took_s < 15.0} {caught.value}"

    messages = told_by_survivors(train, 4, tmp_path)
    assert sorted(messages) == [0, 1, 2]
    for text in messages.values():
        assert text.startswith("True True ") and "[3]" in text, text
