"""Lending while units are away: ranks hold shards of different sizes, and results are those without any loan."""

import pytest
import torch
import torch.distributed as dist
from helpers.parallel_layers import HEAD_SIZE, HEADS, NEURONS, WIDTH, Attention, FeedForward, lend, randn
from helpers.segments import convert_and_find
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import zeroresize as zr
from zeroresize.config.keys import MIGRATION_TRANSPORTS
from zeroresize.conversion import balanced_layers
from zeroresize.plan.group import Loan
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.resharding.units.moving_units import move_units

TOKENS = 6


class Model(nn.Module):
    """Two segments, and a pair of layers that is in none."""

    def __init__(self, group):
        super().__init__()
        torch.manual_seed(0)
        self.attention = Attention(group)
        self.feed_forward, self.even = FeedForward(group), FeedForward(group)

        def follow(heads):
            self.attention.num_heads = len(heads)

        attention, even = self.attention, (self.even.up, self.even.down)
        of_heads = {"unit_size": HEAD_SIZE, "min_units": 0, "kind": "heads"}
        named = [
            zr.Segment([attention.q, attention.k, attention.v], attention.out, on_change=follow, **of_heads),
            zr.Segment([self.feed_forward.up], self.feed_forward.down, min_units=0, kind="neurons"),
        ]
        self.group, self.checkpoints = group, False
        self.segments, _ = convert_and_find(self, group, named)
        self.segments = [segment for segment in self.segments if not segment.name.startswith("even")]
        assert len(self.segments) == len(named)
        for layer in even:
            layer.segment = None
        self.layers = balanced_layers(self)

    def forward(self, x):
        for body in (self.feed_forward, self.attention, self.even):
            if isinstance(body, Attention):
                x = x[None]
            x = checkpoint(body, x, use_reentrant=False) if self.checkpoints else body(x)
            if isinstance(body, Attention):
                x = x[0]
        return x

    def move(self, maps):
        targets = {segment.name: maps[len(segment.owned.owners)] for segment in self.segments}
        move_units(self.segments, targets, process_group=self.group, optimizer=None, model=self)


def counts_of(heads, neurons):
    """Maps by the number of units, from what each rank owns."""
    return {sum(counts): OwnershipMap.home(sum(counts), len(counts)).with_counts(counts) for counts in (heads, neurons)}


def scattered(num_ranks):
    """Rank r owns every R-th unit from r on; rank 0 half of those that rank 1 had, too."""
    maps = {}
    for number in (HEADS, NEURONS):
        owners = torch.arange(number).numpy() % num_ranks
        owners[1 :: 2 * num_ranks] = 0
        maps[number] = OwnershipMap(owners, num_ranks)
    return maps


def results(model, micro_batches=2, dtype=torch.float64, run=None):
    """By name y and dx of each micro-batch, the second of which is recomputed, and dw of both; gradients go again."""
    tensors = {}
    for micro_batch in range(micro_batches):
        model.checkpoints = micro_batch == 1
        x = randn(TOKENS, WIDTH, seed=micro_batch, dtype=dtype).requires_grad_()
        y = (model if run is None else run)(x)
        y.square().sum().backward()
        tensors |= {f"y {micro_batch}": y.detach(), f"dx {micro_batch}": x.grad}
    tensors |= {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return tensors


def assert_same(actual, expected, tolerance=1e-12):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(tensor.abs().max().item(), 1.0) if tensor.numel() else 1.0
        assert_close(
            actual[name],
            tensor,
            rtol=0.0,
            atol=tolerance * scale,
            msg=lambda text, name=name: f"{name}: {text}",
        )


#: By the number of ranks: who owns how many heads and neurons, and who lends what to whom.
CASES = {
    2: {
        "at home": (counts_of((6, 6), (12, 12)), [Loan(0, 0.5, (1,), (1.0,))]),
        "the larger lends": (counts_of((8, 4), (16, 8)), [Loan(0, 0.5, (1,), (1.0,))]),
        "the smaller lends": (counts_of((8, 4), (17, 7)), [Loan(1, 0.5, (0,), (1.0,))]),
        "the receiver owns nothing": (counts_of((12, 0), (24, 0)), [Loan(0, 0.4, (1,), (1.0,))]),
        "the owner owns nothing": (counts_of((12, 0), (24, 0)), [Loan(1, 0.5, (0,), (1.0,))]),
        "no head of one rank": (counts_of((12, 0), (20, 4)), [Loan(1, 0.5, (0,), (1.0,))]),
        "no column of a layer": (counts_of((11, 1), (22, 2)), [Loan(1, 0.2, (0,), (1.0,))]),
        "all of the larger": (counts_of((9, 3), (20, 4)), [Loan(0, 1.0, (1,), (1.0,))]),
    },
    3: {
        "the smaller ones lend": (
            counts_of((6, 3, 3), (14, 6, 4)),
            [Loan(1, 0.5, (0,), (1.0,)), Loan(2, 0.75, (0,), (1.0,))],
        ),
        "uneven parts, owners borrow": (
            counts_of((2, 7, 3), (3, 10, 11)),
            [Loan(0, 0.5, (1, 2), (0.25, 0.75)), Loan(1, 0.5, (2, 0), (0.9, 0.1))],
        ),
        "a receiver owns nothing": (counts_of((7, 5, 0), (10, 14, 0)), [Loan(1, 0.5, (2, 0), (0.7, 0.3))]),
        "an owner owns nothing": (
            counts_of((7, 5, 0), (10, 14, 0)),
            [Loan(2, 0.5, (0, 1), (0.5, 0.5)), Loan(0, 0.5, (2, 1), (0.5, 0.5))],
        ),
        "units that lie scattered": (scattered(3), [Loan(0, 0.6, (1, 2), (0.5, 0.5))]),
    },
    4: {"one looks on at sums": (counts_of((6, 1, 2, 3), (3, 9, 7, 5)), [Loan(1, 0.5, (3, 0), (0.5, 0.5))])},
}
each_group = pytest.mark.parametrize("num_ranks", CASES)
each_transport = pytest.mark.parametrize("migration_transport", MIGRATION_TRANSPORTS)


@pytest.mark.few(2)
@pytest.mark.slow
@each_group
@each_transport
def test_results_are_those_without_loans(run_ranks, migration_transport, num_ranks):
    """One division after another with one lender: loans begin again after every move."""

    def train(rank, group):
        model, lender = Model(group), None
        for seed, (case, (maps, loans)) in enumerate(CASES[num_ranks].items()):
            if lender is not None:
                lender.take_back()
                for layer in model.layers.values():
                    layer.plan = None
            model.move(maps)
            expected = results(model)
            lender = lend(model.layers, group, loans, migration_transport, seed=seed, lender=lender)
            try:
                assert_same(results(model), expected)
            except Exception as error:
                raise AssertionError(f"{case}: {error}") from error

    run_ranks(train, num_ranks)


@each_transport
def test_under_autocast_shards_differ_too(run_ranks, migration_transport):
    def train(rank, group):
        model = Model(group)
        model.move(counts_of((8, 4), (17, 7)))
        model.float()

        def run(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(x)

        expected = results(model, dtype=torch.float32, run=run)
        lend(model.layers, group, [Loan(0, 0.5, (1,), (1.0,))], migration_transport)
        assert_same(results(model, dtype=torch.float32, run=run), expected, tolerance=2**-5)

    run_ranks(train, 2)


@each_transport
def test_replicas_average_whole_gradients(run_ranks, migration_transport):
    """Two replicas of two ranks with uneven shards; only the second one lends."""

    def train(rank, world):
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
        group = groups[rank // 2]
        model = Model(group)
        model.move(counts_of((8, 4), (17, 7)))
        replicated = DistributedDataParallel(model, process_group=replicas)
        expected = results(model, micro_batches=1, run=replicated)
        loans = [Loan(0, 0.5, (1,), (1.0,))] if rank >= 2 else []
        lend(model.layers, group, loans, migration_transport)
        assert_same(results(model, micro_batches=1, run=replicated), expected)

    run_ranks(train, 4)
