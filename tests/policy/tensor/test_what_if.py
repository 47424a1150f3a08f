"""In mode "off": what the other modes would decide."""

import math

import pytest
from helpers.states import resumed

from zeroresize import BalanceConfig
from zeroresize.config.keys import MODES
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.what_if import WhatIf

RANKS, OTHERS = 4, [mode for mode in MODES if mode != "off"]
OFF = BalanceConfig(mode="off", tolerance=0.2)


def told_at(update):
    """Rank 1 grows slower and slower."""
    samples = [RankTimes(0.3, 0.7 * chi, 1.0, ResizingCost.linear(0.9)) for chi in (1.0, 1.0 + update, 1.0, 1.0)]
    return samples, CollectiveTimes(0.01, (0.0,) * RANKS, MigrationCost(0.01, 0.02))


def test_it_tells_what_each_mode_would_have_decided_also_from_its_state_and_in_other_modes_nothing():
    what_if, deciding = WhatIf(OFF, RANKS), {mode: Controller(OFF.in_mode(mode), RANKS) for mode in OTHERS}
    for update in range(6):
        what_if.update(*told_at(update))
        plans = {mode: controller.update(*told_at(update)) for mode, controller in deciding.items()}
        assert what_if.plans == plans
        if update == 3:
            saved, what_if = what_if, WhatIf(OFF, RANKS)
            what_if.go_on_with([resumed(*pair) for pair in zip(saved.controllers, what_if.controllers, strict=True)])
            assert [plan.ranks for plan in what_if.plans.values()] == [plan.ranks for plan in plans.values()]
    for mode in OTHERS:
        without = WhatIf(BalanceConfig(mode=mode), RANKS)
        without.update(*told_at(0))
        assert without.plans == {} and without.controllers == ()


@pytest.mark.parametrize(
    ("chi", "rest_s", "products_s", "reason"),
    [
        (math.nan, 0.3, 0.7, "not all ranks have been measured yet"),
        (1.0, 0.3, 0.7, "no rank has been slow for long enough, beyond noise"),
        (
            3.0,
            1.0,
            0.0001,
            "no change is worth its cost: balanced products divided by speed make steps 0 % shorter at most",
        ),
        (3.0, 0.3, 0.7, ""),
    ],
)
def test_where_a_mode_spares_nobody_it_tells_why(chi, rest_s, products_s, reason):
    """Slowness outside of the balanced layers can be great, and no mode can divide it."""
    what_if = WhatIf(OFF, RANKS)
    for _ in range(6):
        cost = ResizingCost.linear(0.9)
        samples = [RankTimes(rest_s * each, products_s * each, 1.0, cost) for each in (1.0, chi, 1.0, 1.0)]
        what_if.update(samples, CollectiveTimes(0.01, (0.0,) * RANKS, MigrationCost(0.01, 0.02)))
    assert what_if.verdicts == dict.fromkeys(OTHERS, reason)
    for plan in what_if.plans.values():
        assert any(rank.spared for rank in plan.ranks) == (not reason)
