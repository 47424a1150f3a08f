"""Pipelines of data-parallel replicas have the same boundaries at all times: they move alike or not at all."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import sleeping_layers
from helpers.on_ranks import gathered, on_ranks
from helpers.processes import dying, send_half, told_by_survivors
from helpers.sleeping_layers import undivided_losses

from zeroresize.resharding import agreement, transaction, transport

pytestmark = pytest.mark.same_ranks

NUM_LAYERS = 6


class Replica(sleeping_layers.Training):
    """One of two pipelines of two stages, rank by rank: 0 and 1, 2 and 3. Each trains on half of every batch."""

    def __init__(self, rank, num_layers=NUM_LAYERS, **options):
        def group_of(ranks):
            return dist.new_group(ranks, timeout=timedelta(seconds=5))

        pipelines, stages = [[group_of(ranks) for ranks in own] for own in (([0, 1], [2, 3]), ([0, 2], [1, 3]))]
        self.replica, stage = divmod(rank, 2)
        self.same_stage = stages[stage]
        super().__init__(pipelines[self.replica], num_layers, **{"replicas": self.same_stage} | options)

    def batch(self):
        return (half.chunk(2)[self.replica] for half in super().batch())

    def reduce(self):
        for parameter in self.pipeline.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.same_stage)
                parameter.grad /= 2


@pytest.mark.parametrize("tied", [(), (0, 3, 5)])
@on_ranks(4)
def test_a_straggler_in_one_replica_moves_layers_in_both(rank, group, *, tied):
    training = Replica(rank, tied=tied)
    boundaries = [training.train(6)]
    training.pace.of_rank = 3.0 if rank == 3 else 1.0
    boundaries.append(training.train(10))
    training.pace.of_rank = 1.0
    boundaries.append(training.train(10))
    by_rank = gathered(group, (boundaries, training.records, training.balancer.state_dict(), training.losses))
    assert all(told[:3] == by_rank[0][:3] for told in by_rank)
    even, slow, recovered = by_rank[0][0]
    assert even == (0, 3, 6) and slow[1] > 3 and recovered[1] < slow[1]
    losses = [sum(halves) / 2 for halves in zip(by_rank[1][3], by_rank[3][3], strict=True)]
    assert losses == pytest.approx(undivided_losses(NUM_LAYERS, 26, tied), rel=1e-10, abs=0.0)
    weights = gathered(group, training.pipeline.layers[tied[0]].linear.weight.detach()) if tied else [torch.empty(0)]
    assert all(torch.equal(weight, weights[0]) for weight in weights)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("when", ["before", "while", "after", "during backward"])
def test_a_rank_that_dies_in_a_move_keeps_layers_where_they_are_in_all_replicas(tmp_path, when):
    def check(rank, group):
        training = Replica(rank, move_during_backward=when == "during backward")
        training.train(3)
        training.pace.of_rank = 3.0 if rank == 1 else 1.0
        if rank == 3 and when == "after":
            transaction.require_received = lambda *_, **__: os._exit(0)
        elif rank == 3:
            transport.start_messages = dying(send_half if when == "while" else lambda *_: None)
        begin = time.perf_counter()
        with pytest.raises(RuntimeError) as caught:
            training.train(10)
        assert time.perf_counter() - begin < 20.0
        assert training.pipeline.boundaries == (0, 3, 6) and training.records == []
        held = [one.numel() > 0 for one in training.pipeline.parameters()]
        assert held == [(number < 3) == (rank % 2 == 0) for number in range(6) for _ in range(2)]
        return str(caught.value)

    texts = told_by_survivors(check, 4, tmp_path)
    assert sorted(texts) == [0, 1, 2], texts
    for rank, text in texts.items():
        # Rank 2 had a step under way with the one that died, rank 0 with rank 1, whose targets count with rank 3's.
        is_cut_off = rank in (0, 2) and when == "during backward"
        assert text.startswith("nothing has moved or changed") or (is_cut_off and "Traceback" not in text), text
    assert "rank 3" in texts[0] or "ranks [3]" in texts[0] or when == "during backward", texts[0]


@on_ranks(4)
def test_what_does_not_fit_in_one_replica_moves_in_none(rank, group, *, monkeypatch):
    training = Replica(rank)
    training.train(3)
    training.pace.of_rank = 3.0 if rank == 3 else 1.0
    with monkeypatch.context() as patched:
        if rank == 2:
            patched.setattr(agreement, "free_bytes", lambda device: 10)
            patched.setattr(agreement, "_place_of", lambda device: "a small device")
        refused = training.train(5)
    by_rank = gathered(group, (refused, training.train(12), len(training.records)))
    assert by_rank == [by_rank[0]] * 4
    refused, moved, num_moves = by_rank[0]
    assert refused == (0, 3, 6) and moved[1] > 3 and num_moves >= 1


@on_ranks(4)
def test_replicas_must_be_alike_and_whole(rank, group):
    for options, message in (
        ({"boundaries": (0, 2, 6) if rank < 2 else (0, 3, 6)}, "do not agree on boundaries"),
        ({"num_layers": 6 if rank < 2 else 5}, "do not agree on layers"),
        ({"profile_every": 4 if rank < 2 else 5}, "do not agree on the options of PipelineBalancer"),
    ):
        with pytest.raises(ValueError, match=message):
            Replica(rank, **options)
    crossed = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    with pytest.raises(ValueError, match="make no whole replicas"):
        Replica(rank, replicas=crossed[0] if rank in (0, 3) else crossed[1])
