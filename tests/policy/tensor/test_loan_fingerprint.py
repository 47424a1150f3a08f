"""The number by which ranks tell whether they hold the same plan and state."""

import dataclasses

import pytest
from helpers.states import resumed

from zeroresize import BalanceConfig
from zeroresize.plan.group import Loan, Shares
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.loan_fingerprint import fingerprint_of_loans
from zeroresize.policy.tensor.rules.sharing import loans_of


def lending(*chis):
    """A controller of ranks of which the slow one lends, and its plan."""
    chis = chis or (1, 1, 1, 4)
    controller = Controller(BalanceConfig(mode="mig"), len(chis))
    for _ in range(3):
        plan = controller.update([RankTimes(0.3, 0.7 * chi, 1.0, ResizingCost.linear(0.9)) for chi in chis])
    assert plan.loans
    return controller, plan


@pytest.mark.parametrize("chis", [(1, 1, 1, 4), (4, 1), (1, 4)], ids=str)
def test_equal_ones_have_one_number_also_from_a_loaded_state(chis):
    """Rank 1 alone receives all of a loan: its number and its part are both 1."""
    (first, plan), (second, same) = lending(*chis), lending(*chis)
    assert first.fingerprint(plan, 1, "x") == second.fingerprint(same, 1, "x")
    loaded = resumed(first, Controller(first.config, len(chis)))
    assert loaded.fingerprint(loaded.current_plan(), 1) == first.fingerprint(first.current_plan(), 1)


def test_it_is_a_whole_number_that_a_float_holds_exactly():
    number = fingerprint_of_loans((), "x")
    assert number == int(number) and 0 <= number < 2**52


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("_times", RankTimes(0.3, 0.7, 1.0, ResizingCost.linear(0.9), 2**-40)),
        ("_usual", RankTimes(0.3, 0.7, 1.0 + 2**-40, ResizingCost.linear(0.9))),
        ("_shares", Shares(2**-40)),
        ("_measured_under", Shares(0.0, 2**-40)),
        ("_are_stragglers", True),
    ],
)
def test_anything_of_a_rank_that_differs_shows(part, value):
    controller, plan = lending()
    before = controller.fingerprint(plan)
    of_ranks = list(getattr(controller, part))
    assert of_ranks[1] != value
    of_ranks[1] = value
    setattr(controller, part, of_ranks)
    assert controller.fingerprint(plan) != before


def test_how_long_ranks_were_slow_shows():
    controller, plan = lending()
    before = controller.fingerprint(plan)
    controller._spells.ages[0] += 1
    later = controller.fingerprint(plan)
    controller._spells.past.append((0, 0.5, 3, 1.0))
    assert len({before, later, controller.fingerprint(plan)}) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"predicted_step_s": 1.0},
        {"loans": ()},
        {"loans": (Loan(3, 0.5, (0, 1, 2), (0.25, 0.25, 0.5)),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_anything_of_a_plan_that_differs_shows(change):
    controller, plan = lending()
    assert controller.fingerprint(dataclasses.replace(plan, **change)) != controller.fingerprint(plan)


@pytest.mark.parametrize("name", ["plain_s", "scale", "forgetting", "scale_before", "_calibrated"])
def test_what_is_known_of_communication_shows(name):
    controller, plan = lending()
    before = controller.fingerprint(plan)
    setattr(controller._communication, name, MigrationCost(1.0, 1.0) if name == "_calibrated" else 0.125)
    assert controller.fingerprint(plan) != before


def test_whether_loans_share_their_receivers_makes_no_difference():
    shared = loans_of([0.5, 0.0, 0.5, 0.0], [1.0, 2.0, 1.0, 3.0])
    assert shared[0].receivers is shared[1].receivers
    apart = tuple(Loan(one.owner, one.share, (*one.receivers,), (*one.parts,)) for one in shared)
    apart = tuple(dataclasses.replace(one, parts=tuple(list(one.parts))) for one in apart)
    assert apart[0].parts is not shared[0].parts
    assert (
        fingerprint_of_loans((shared,))
        == fingerprint_of_loans((apart,))
        != fingerprint_of_loans((shared[:1],))
        != fingerprint_of_loans((shared, ()))
    )
