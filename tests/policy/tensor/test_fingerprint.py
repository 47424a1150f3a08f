"""The number by which ranks tell whether they hold the same plan and state."""

import dataclasses

import pytest
from helpers.states import resumed

from zeroresize import BalanceConfig
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes
from zeroresize.policy.tensor.estimation.times import RankTimes


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


def test_what_was_measured_what_is_known_of_collectives_and_what_is_decided_show():
    controller, plan = lending()
    others = [lending(deviation=2**-40), lending((1, 1, 1, 4.000001))]
    others += [lending(seen=CollectiveTimes(0.125, (0.0,) * 4))]
    others += [lending(seen=CollectiveTimes(0.0, (0.0,) * 4, MigrationCost(1e-9, 1e-9)))]
    numbers = [
        controller.fingerprint(plan),
        controller.fingerprint(plan, 1),
        controller.fingerprint(dataclasses.replace(plan, predicted_step_s=1.0)),
        *(made.fingerprint(plan) for made, _ in others),
    ]
    assert len(set(numbers)) == len(numbers)
    controller.update([RankTimes(0.3, 0.7 * chi, 1.0, ResizingCost.linear(0.9)) for chi in (1, 1, 1, 4)])
    assert controller.fingerprint(plan) not in numbers, "how long ranks were slow shows"
