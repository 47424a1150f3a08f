"""The controller, update by update; what it tells of its plans, and by which number ranks compare them."""

import math

import pytest
from helpers.states import resumed
from helpers.virtual_training import LINEAR

from zeroresize.config import BalanceConfig
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import ResizingCost
from zeroresize.policy.tensor.estimation.times import RankTimes


def rank(rest_s, gemm_s, cost=LINEAR, gather_fill_scale=1.0):
    return RankTimes(rest_s, gemm_s, gather_fill_scale, cost)


def test_off_measures_but_never_prunes():
    controller = Controller(BalanceConfig(mode="off"), 2)
    plan = controller.update([rank(0.3, 0.7), rank(0.3, 5.6)])
    assert [p.pruned for p in plan.ranks] == [0.0, 0.0]
    assert [p.is_straggler for p in plan.ranks] == [False, True]


def test_a_rank_that_measured_nothing_yet_changes_nothing():
    controller = Controller(BalanceConfig(mode="zero-rd"), 2)
    plan = controller.update([rank(0.3, 0.7), rank(math.nan, math.nan)])
    assert [p.pruned for p in plan.ranks] == [0.0, 0.0]


def test_controller_goes_on_from_its_state():
    samples = [rank(0.3, 0.7), rank(0.3, 2.8)]
    saved = Controller(BalanceConfig(mode="zero-rd"), 2)
    saved.update(samples)
    loaded = resumed(saved)
    assert loaded.current_plan().ranks == saved.current_plan().ranks
    assert loaded.update(samples) == saved.update(samples)
    with pytest.raises(ValueError, match="of 2 ranks, this process group has 3"):
        resumed(saved, Controller(BalanceConfig(), 3))


def unsure(chi, deviation):
    return RankTimes(0.2, 0.8 * chi, 1.0, LINEAR, deviation)


@pytest.mark.parametrize(
    ("mode", "deviation", "is_relieved"),
    [("zero-pri", 0.02, True), ("zero-pri", 0.08, False), ("mig", 0.05, True), ("mig", 0.15, False)],
)
def test_a_start_needs_certainty(mode, deviation, is_relieved):
    """χ = 1.3: 24 % more than the reference."""
    controller = Controller(BalanceConfig(mode=mode), 4)
    for _ in range(4):
        plan = controller.update([unsure(chi, deviation) for chi in (1.0, 1.0, 1.0, 1.3)])
    assert bool(plan.relieved) == is_relieved


def test_a_straggler_of_which_little_is_known_any_more_is_let_go():
    controller = Controller(BalanceConfig(mode="zero-pri"), 4)
    normal = [unsure(1.0, 0.01)] * 3
    for _ in range(2):
        plan = controller.update([*normal, unsure(4.0, 0.01)])
    assert plan.relieved == [3]
    assert controller.update([*normal, unsure(3.5, 0.3)]).relieved == [3], "slow in any case"
    assert controller.update([*normal, unsure(1.2, 0.3)]).relieved == []


def test_a_receiver_that_is_slow_for_a_moment_goes_on_receiving():
    controller = Controller(BalanceConfig(mode="mig"), 4)
    times = [unsure(chi, 0.01) for chi in (1.0, 1.0, 1.0, 3.0)]
    for _ in range(3):
        before = controller.update(times)
    assert before.loans
    assert controller.update([times[0], unsure(1.3, 0.01), *times[2:]]).loans == before.loans
    for _ in range(4):
        later = controller.update([times[0], unsure(1.3, 0.01), *times[2:]])
    assert later.loans != before.loans


def lending(chis=(1, 1, 1, 4), deviation=0.0, seen=None):
    """A controller of ranks of which the slow one lends, and its plan."""
    controller = Controller(BalanceConfig(mode="mig"), len(chis))
    cost = ResizingCost.linear(0.9)
    for _ in range(3):
        plan = controller.update([RankTimes(0.3, 0.7 * chi, 1.0, cost, deviation) for chi in chis], seen)
    assert plan.loans
    return controller, plan


@pytest.mark.parametrize("chis", [(1, 1, 1, 4), (4, 1), (1, 4)], ids=str)
def test_equal_ones_have_one_number_also_from_a_loaded_state(chis):
    """Rank 1 alone receives all of a loan: its number and its part are both 1."""
    (first, plan), (second, same) = lending(chis), lending(chis)
    number = first.fingerprint(plan, 1, "x")
    assert number == second.fingerprint(same, 1, "x") == int(number) and 0 <= number < 2**52
    loaded = resumed(first, Controller(first.config, len(chis)))
    assert loaded.fingerprint(loaded.current_plan(), 1) == first.fingerprint(first.current_plan(), 1)
