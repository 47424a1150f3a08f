"""Heads of a slow rank move one by one where that pays with copies of k and v, else in groups; and home again."""

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from helpers.virtual_training import FEATURES, Run
from torch import nn

import zeroresize as zr

pytestmark = [pytest.mark.same_ranks, pytest.mark.usefixtures("lending_is_dear", "cheap_moves")]

HEAD = 8


def attention(heads, kv_heads, **options):
    """A model as ``Run`` takes it."""

    class Attention(nn.Module):
        def __init__(self, group):
            super().__init__()
            torch.manual_seed(0)

            def split(number):
                linear = nn.Linear(FEATURES, number * HEAD)
                return zr.ColumnParallelLinear.from_linear(linear, process_group=group)

            self.up, self.k, self.v = split(heads), split(kv_heads), split(kv_heads)
            self.down = zr.RowParallelLinear.from_linear(nn.Linear(heads * HEAD, FEATURES), process_group=group)
            named = {"unit_size": HEAD, "shared": ["k", "v"], "group_size": heads // kv_heads, "min_units": 0}
            named |= options
            zr.convert(self, process_group=group, segments=[zr.Segment(["up"], "down", kind="heads", **named)])

        def forward(self, x):
            q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(0, 1) for layer in (self.up, self.k, self.v))
            attended = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return x + self.down(attended.transpose(0, 1).flatten(1))

    return Attention


def trained(run, group, chi_here, number=8):
    """What a step takes once so many decisions were made, and how many heads ranks have."""
    run.time.chi = chi_here
    run.updates(number)
    began_s = run.time.now
    run.steps(1)
    return max(gathered(group, run.time.now - began_s)) - 0.01, run.model.down.segment.counts


#: Ranks, heads, those of k and v, χ of rank 0 → heads of each rank, and how many blocks of k and v the slowest has.
CASES = [
    (2, 16, 2, 2.0, (5, 11), 2),
    (2, 8, 4, 1.3, (4, 4), 2),  # a head more, with its copies, would lengthen the other rank's work by more
    (2, 8, 4, 3.0, (2, 6), 3),  # a whole group
    (4, 8, 4, 2.0, (1, 3, 2, 2), 2),
    (4, 8, 4, 4.0, (0, 3, 3, 2), 2),
]
#: What a head takes, and a block of k and v: gradients of x are wanted behind the last layer only.
HEAD_WORK, BLOCK_WORK = 2 + 3, 2 + 2


def check_cases(rank, group, num_ranks):
    for _, heads, kv_heads, chi, counts, blocks in (case for case in CASES if case[0] == num_ranks):
        run = Run(group, gather_s=0.0, model=attention(heads, kv_heads), mode="exact", update_every=4)
        run.x = run.x.repeat(32, 1)
        even_s, _ = trained(run, group, 1.0, 2)
        step_s, now = trained(run, group, chi if rank == 0 else 1.0)
        slowest = chi if len(set(counts)) == 1 else 1.0
        work = slowest * (HEAD_WORK * max(counts) + BLOCK_WORK * blocks)
        of_even = (HEAD_WORK * heads + BLOCK_WORK * kv_heads) / num_ranks
        assert now == counts and step_s == pytest.approx(even_s * work / of_even, rel=1e-6)
        step_s, now = trained(run, group, 1.0)
        assert len(set(now)) == 1 and step_s == pytest.approx(even_s)
        run.balancer.close()


@on_ranks(2)
def test_heads_or_groups_of_a_slow_rank_move(rank, group):
    check_cases(rank, group, 2)


@pytest.mark.slow
@on_ranks(4)
def test_heads_of_a_slow_rank_of_four_move(rank, group):
    check_cases(rank, group, 4)


@pytest.mark.slow
@on_ranks(2)
def test_ranks_of_one_head_each_divide_the_slow_ones_and_whole_ones_stay(rank, group):
    of_rank = {}
    for divisible in (False, True):
        model = attention(2, 2, divisible=divisible)
        run = Run(group, gather_s=0.0, model=model, mode="exact", update_every=4)
        run.x = run.x.repeat(32, 1)
        even_s, _ = trained(run, group, 1.0, 2)
        step_s, now = trained(run, group, 2.0 if rank == 0 else 1.0)
        of_rank[divisible] = step_s / even_s
        assert (now == (1, 1)) != divisible and sum(now) == 2, (
            now,
            run.model.down.segment.quantum,
            run.balancer._parts.decider.controller.verdict,
            run.balancer._parts.decider.plan.owned,
            run.balancer._parts.decider.controller.ownership.segments,
        )
        if divisible:  # keys and values are those of all tokens of the only sequence
            of_ranks = (HEAD_WORK * now[0] + BLOCK_WORK) * 2.0, HEAD_WORK * now[1] + 2 * BLOCK_WORK
            assert of_rank[True] == pytest.approx(max(of_ranks) / (HEAD_WORK + BLOCK_WORK), rel=0.02)
        step_s, now = trained(run, group, 1.0)
        assert now == (1, 1) and step_s == pytest.approx(even_s)
        run.balancer.close()
    assert of_rank[False] == pytest.approx(2.0) and of_rank[True] < 1.7
