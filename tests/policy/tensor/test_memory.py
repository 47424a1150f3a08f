"""Divisions that fit into the ranks' memory, in whole units, and decisions that keep to them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize import BalanceConfig
from zeroresize.plan.ownership import SegmentWork, normalised, unit_counts
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.memory import GroupMemory, HeldBytes
from zeroresize.policy.tensor.rules.ownership import nearest_fitting

SEGMENTS = (SegmentWork(12, 1, 0.35), SegmentWork(3072, 8, 0.65))
LINEAR = ResizingCost.linear(0.9)


@st.composite
def memories(draw, num_ranks=4):
    parts = draw(st.lists(st.floats(0.3, 4.0), min_size=num_ranks, max_size=num_ranks))
    fixed = draw(st.lists(st.floats(0.0, 500.0), min_size=num_ranks, max_size=num_ranks))
    limits = [of_fixed + 1000.0 * part for of_fixed, part in zip(fixed, parts, strict=True)]
    segments = (SegmentWork(16, 1, 0.3), SegmentWork(4096, 8, 0.6))
    return GroupMemory(limits, [HeldBytes(of_fixed, 1000.0) for of_fixed in fixed], segments)


def held_by(memory, shares, fixed, segments, of_even_share=1000.0):
    """Bytes by counting units, as the ranks would hold them."""
    work = math.fsum(segment.work for segment in segments)
    counts = [unit_counts(shares, segment) for segment in segments]
    return [
        of_rank
        + of_even_share
        * math.fsum(
            segment.work / work * of_ranks[rank] * len(shares) / segment.num_units
            for segment, of_ranks in zip(segments, counts, strict=True)
        )
        for rank, of_rank in enumerate(fixed)
    ]


@given(memories(), st.lists(st.floats(0.05, 5.0), min_size=4, max_size=4))
def test_what_is_fitted_to_the_most_shares_fits_in_whole_units(memory, wanted):
    most = memory.most_shares
    if most is not None and math.fsum(memory.room) < 1.6 * 4:
        return  # together hardly enough for whole units
    shares = nearest_fitting(normalised(wanted), most)
    assert math.fsum(shares) == pytest.approx(4.0, abs=1e-4)
    assert memory.excess_by(shares) == 0.0 and memory.why_too_much(shares) is None
    fixed = [limit - 1000.0 * room for limit, room in zip(memory.limits, memory.room, strict=True)]
    for held, limit in zip(held_by(memory, shares, fixed, memory._segments), memory.limits, strict=True):
        assert held <= limit * (1.0 + 1e-6)


def test_every_rank_fills_the_same_part_of_its_memory():
    memory = GroupMemory((2000.0, 1000.0), [HeldBytes(100.0, 600.0)] * 2, SEGMENTS)
    shares = memory.evenly_filled
    filled = [held / limit for held, limit in zip(memory.bytes_by(shares), memory.limits, strict=True)]
    assert filled[0] == pytest.approx(filled[1], abs=0.06)  # one head of twelve
    assert sum(held - 100.0 for held in memory.bytes_by(shares)) == pytest.approx(1200.0)


def test_where_even_shares_leave_too_little_room_for_activations_it_begins_as_near_to_them_as_leaves_it():
    memory = GroupMemory((4000.0, 1200.0), [HeldBytes(100.0, 600.0)] * 2, SEGMENTS)
    held = memory.bytes_by(memory.at_start)
    assert 2 * held[1] <= 1200.0 and 2 * held[0] <= 4000.0
    assert held[1] > 500.0  # but for whole units


def test_what_does_not_fit_is_told_with_its_bytes():
    memory = GroupMemory((2000.0, 600.0), [HeldBytes(100.0, 600.0)] * 2, SEGMENTS)
    assert memory.why_too_much((1.0, 1.0)) == "rank 1 would hold 700 bytes of at most 600"
    assert memory.excess_by((1.0, 1.0)) == pytest.approx(1 / 6)
    assert memory.have_room_for((2.0, 0.0), (1.0, 1.0)) and not memory.have_room_for((3.0, 0.0), (1.0, 1.0))


def times(*chis):
    return [RankTimes(0.2, 0.8 * chi, 1.0, LINEAR) for chi in chis]


def controller(memory, mode="exact", chi=4.0, updates=40, **config):
    made = Controller(BalanceConfig(mode=mode, update_every=5, **config), len(memory.limits), SEGMENTS)
    if config.get("moves", True):
        made.expect_moves(MoveCost(0.0, 0.01), 1.0)
    made.expect_memory(memory)
    plans = [made.initial_plan()]
    for _ in range(updates):
        lent = tuple(rank.lent * rank.owned for rank in plans[-1].ranks)
        plans.append(made.update(times(1.0, chi), CollectiveTimes(0.01, lent, MigrationCost(0.1, 0.1))))
    return made, plans[1:]


def test_a_slow_ranks_units_go_only_where_there_is_memory():
    roomy, tight = (GroupMemory((limit, 2e3), [HeldBytes(100.0, 600.0)] * 2, SEGMENTS) for limit in (1e4, 900.0))
    free, bound = (controller(memory)[1][-1] for memory in (roomy, tight))
    assert roomy.bytes_by(free.owned)[0] > 1000.0
    assert bound.owned[0] > 1.05 and tight.excess_by(bound.owned) == 0.0
    assert bound.predicted_step_s > free.predicted_step_s


@pytest.mark.parametrize("mode", ["exact", "semi", "mig"])
def test_a_rank_without_room_borrows_nothing(mode):
    roomy, full = (GroupMemory((limit, 2e3), [HeldBytes(100.0, 600.0)] * 2, SEGMENTS) for limit in (1e4, 701.0))
    config = {"exact": {"moves": False}, "semi": {"moves": False, "budget": 0.0}, "mig": {}}[mode]
    for memory, borrows in ((roomy, True), (full, False)):
        _, plans = controller(memory, mode, updates=4, **config)
        assert any(plan.loans for plan in plans) == borrows


def test_units_that_do_not_fit_any_more_move_at_once_whatever_it_costs():
    roomy = GroupMemory((2e3, 2e3), [HeldBytes(100.0, 600.0)] * 2, SEGMENTS)
    tight = GroupMemory((2e3, 600.0), [HeldBytes(100.0, 600.0)] * 2, SEGMENTS)
    made, plans = controller(roomy, chi=1.0, updates=3)
    made.expect_moves(MoveCost(1e9, 1e9), 1.0)
    assert plans[-1].owned == (1.0, 1.0)
    made.expect_memory(tight)
    plan = made.update(times(1.0, 1.0))
    assert tight.excess_by(plan.owned) == 0.0 and plan.owned[0] > 1.1
    assert made.update(times(1.0, 1.0)).owned == plan.owned
    made.expect_memory(roomy)  # and they come home where that pays
    made.expect_moves(MoveCost(0.0, 0.01), 1.0)
    assert [made.update(times(1.0, 1.0)) for _ in range(10)][-1].owned == (1.0, 1.0)


def test_uneven_memory_is_no_debt_of_balancing():
    """However long all ranks were alike before: a slow rank's units move as if it had been so from the start."""
    memory = GroupMemory((3000.0, 500.0, 3000.0), [HeldBytes(100.0, 600.0)] * 3, SEGMENTS)
    made = Controller(BalanceConfig(update_every=5), 3, SEGMENTS)
    made.expect_moves(MoveCost(0.0, 1.0), 1.0)
    made.expect_memory(memory)
    made.hold_owned(memory.at_start)
    made.hold_owned(None)
    for _ in range(200):
        plan = made.update(times(1.0, 1.0, 1.0))
    assert memory.excess_by(plan.owned) == 0.0
    settled = plan.owned
    for _ in range(20):
        plan = made.update(times(4.0, 1.0, 1.0))
        assert memory.excess_by(plan.owned) == 0.0
    assert plan.owned[0] < 0.6 * settled[0]
    for _ in range(60):
        plan = made.update(times(1.0, 1.0, 1.0))
        assert memory.excess_by(plan.owned) == 0.0
    assert plan.owned == pytest.approx(settled, abs=0.1)
