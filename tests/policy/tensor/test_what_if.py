"""In mode "off": what the other modes would decide."""

import pytest
from helpers.states import resumed

from zeroresize import BalanceConfig
from zeroresize.config.keys import MODES
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.what_if import WhatIf

RANKS = 4
OFF = BalanceConfig(mode="off", tolerance=0.2)


def told_at(update):
    """Rank 1 grows slower and slower."""
    chis = [1.0, 1.0 + update, 1.0, 1.0]
    samples = [RankTimes(0.3, 0.7 * chi, 1.0, ResizingCost.linear(0.9)) for chi in chis]
    return samples, CollectiveTimes(0.01, (0.0,) * RANKS, MigrationCost(0.01, 0.02))


def decided(mode, updates):
    """By a controller of that mode, at every one of these updates."""
    controller = Controller(OFF.in_mode(mode), RANKS)
    plan = controller.initial_plan()
    for update in updates:
        plan = controller.update(*told_at(update))
    return plan


def test_it_tells_what_each_mode_would_have_decided_update_after_update():
    what_if = WhatIf(OFF, RANKS)
    for update in range(8):
        what_if.update(*told_at(update))
        assert what_if.plans == {mode: decided(mode, range(update + 1)) for mode in MODES if mode != "off"}


def test_it_goes_on_from_its_state():
    what_if, other = WhatIf(OFF, RANKS), WhatIf(OFF, RANKS)
    for update in range(3):
        what_if.update(*told_at(update))
    other.go_on_with([resumed(*pair) for pair in zip(what_if.controllers, other.controllers, strict=True)])
    assert {mode: plan.ranks for mode, plan in other.plans.items()} == {
        mode: plan.ranks for mode, plan in what_if.plans.items()
    }
    for either in (what_if, other):
        either.update(*told_at(3))
    assert other.plans == what_if.plans


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "off"])
def test_in_other_modes_there_is_nothing_to_ask(mode):
    what_if = WhatIf(BalanceConfig(mode=mode), RANKS)
    what_if.update(*told_at(0))
    assert what_if.plans == {} and what_if.controllers == ()
