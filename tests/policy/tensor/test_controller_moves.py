"""Ownership in the controller: decided, held by a user, refused, remembered."""

import pytest
from helpers.states import resumed

from scripts.simulated.cluster import Cluster
from scripts.simulated.noise import Noise
from scripts.simulated.training import simulate, unbalanced_step_s
from zeroresize.config import BalanceConfig
from zeroresize.plan.ownership import SegmentWork
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost, spread_ratios
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes
from zeroresize.policy.tensor.estimation.times import RankTimes

#: What pruning costs where a swinging load was simulated.
COST = ResizingCost(spread_ratios(0.9), (1.0, 0.85, 0.68, 0.51, 0.33, 0.14), (0.0, 0.03, 0.03, 0.027, 0.022, 0.018))
SEGMENTS = (SegmentWork(4800, 8, 0.7), SegmentWork(4800, 8, 0.3))
HOME, AWAY = (1.0,) * 4, (1.2, 1.2, 1.2, 0.4)
#: A move takes next to nothing, so that it is made as soon as anybody is slow.
FREE = MoveCost(1e-12, 1e-9)


def controller(cost=FREE, segments=SEGMENTS, **config):
    made = Controller(BalanceConfig(**config), 4, segments)
    made.expect_moves(cost, 1e6)
    made.initial_plan()
    return made


def group(chi=1.0):
    return [RankTimes(0.2, 0.8 * one, 1.0, ResizingCost.linear(0.9), 0.01) for one in (1.0, 1.0, 1.0, chi)]


def collectives_of(plan, migration=None):
    return CollectiveTimes(0.0, tuple(rank.lent for rank in plan.ranks), migration)


def updated(made, chi, times=3):
    plan = made.current_plan()
    for _ in range(times):
        plan = made.update(group(chi), collectives_of(plan, MigrationCost(0.01, 0.05)))
    return plan


@pytest.mark.parametrize("config", [{"mode": "exact"}, {"mode": "semi", "budget": 0}, {"mode": "semi", "min_gain": 1}])
def test_a_straggler_gives_units_and_gets_them_back(config):
    made = controller(**config)
    plan = updated(made, 4.0)
    assert plan.owned[3] == pytest.approx(4 / 3.25 / 4, rel=0.05) and plan.owned[0] == plan.owned[1] == plan.owned[2]
    assert plan.relieved == [] and plan.loans == ()
    assert plan.predicted_step_s == pytest.approx(0.2 + 0.8 * 4 / 3.25, rel=0.03)
    assert updated(made, 1.0).owned == HOME


@pytest.mark.parametrize("chi", [2.0, 4.0, 8.0])
def test_semi_prunes_only_what_the_others_cannot_take_within_half_the_tolerance(chi):
    made = controller(mode="semi", min_gain=0.05)
    plan = updated(made, chi, times=4)
    slow = plan.ranks[3]
    most = (1.05 - 0.2) / 0.8  # of what another rank computes in an even share's time
    assert plan.owned[:3] == pytest.approx((most,) * 3, rel=0.01)
    assert slow.owned * (1.0 - slow.pruned) == pytest.approx(most / chi, rel=0.05) and slow.lent == 0.0
    assert plan.predicted_step_s <= 1.05 * 1.021
    home = updated(made, 1.0)
    assert home.owned == HOME and home.relieved == []


def test_until_the_move_pays_the_default_lends_as_mig_does():
    dear = MoveCost(1.0, 0.0)
    made, migrating = controller(dear), controller(mode="mig")
    plan, other = updated(made, 4.0), updated(migrating, 4.0)
    assert plan == other and plan.loans and not any(rank.pruned for rank in plan.ranks)


@pytest.mark.parametrize(
    "config",
    [{"mode": mode} for mode in ("off", "mig", "zero-pri")]
    + [
        {"mode": "semi", "paper": {"semi_rule": "paper"}},
        {"mode": "semi", "paper": {"num_migrating": 1}},
        {"moves": False},
    ],
    ids=str,
)
def test_other_modes_leave_units_at_home(config):
    made, without = controller(**config), controller(segments=(), **config)
    assert updated(made, 4.0) == updated(without, 4.0)
    assert made.current_plan().owned == HOME


@pytest.mark.parametrize("mode", ["exact", "semi", "mig", "zero-pri"])
def test_what_a_user_holds_stays_whatever_is_measured_until_it_is_released(mode):
    made = controller(mode=mode, **({"min_gain": 0} if mode in ("semi", "zero-pri") else {}))
    plan = made.hold_owned((2, 1, 1, 0))
    assert plan.owned == (2.0, 1.0, 1.0, 0.0)
    for chi in (1.0, 8.0):
        assert updated(made, chi).owned == (2.0, 1.0, 1.0, 0.0)
    assert made.verdict == ("a user decides" if mode in ("exact", "semi") else "")
    made.hold_owned(None)
    if mode in ("mig", "zero-pri"):
        return
    assert made.current_plan().owned == (2.0, 1.0, 1.0, 0.0)
    assert updated(made, 1.0).owned == HOME


def test_a_ratio_is_forced_of_what_ranks_own():
    made = controller(mode="zero-pri", ratio=0.5, ranks="all")
    plan = made.hold_owned(AWAY)
    assert plan.owned == AWAY and [rank.pruned for rank in plan.ranks] == [0.5] * 4
    assert updated(made, 4.0).ranks[0].pruned == 0.5


def test_ranks_whose_shares_a_user_gives_are_compared_by_what_they_take_for_these():
    """Rank 3 is three times slower and owns a third of what the others do: nobody is a straggler."""
    for mode in ("zero-pri", "mig", "semi", "exact"):
        made = controller(mode=mode)
        made.hold_owned(AWAY)
        assert updated(made, 3.0).relieved == []
    made = controller(mode="zero-pri", min_gain=0.1)
    made.hold_owned(AWAY)
    slow = updated(made, 9.0).ranks[3]
    others_s = 0.2 + 0.8 * 1.2
    assert slow.owned * (1.0 - slow.pruned) == pytest.approx((0.95 * others_s - 0.2) / (0.8 * 9.0), rel=0.1)


def test_what_is_lent_of_uneven_shares_makes_all_ranks_equally_long():
    made = controller(mode="mig")
    made.hold_owned(AWAY)
    plan = updated(made, 9.0)
    assert plan.ranks[3].lent > 0.3
    computed = [rank.owned * (1.0 - rank.spared) + rank.borrowed for rank in plan.ranks]
    busy_s = [0.2 + 0.8 * chi * share for chi, share in zip((1, 1, 1, 9), computed, strict=True)]
    assert sum(computed) == pytest.approx(4.0, abs=1e-5) and max(busy_s) <= 1.05 * min(busy_s)


@pytest.mark.parametrize("chi", [1.0, 4.0])
def test_it_goes_on_from_its_state_with_units_away(chi):
    made = controller()
    updated(made, 4.0)
    other = resumed(made, controller())
    assert other.current_plan().owned == made.current_plan().owned != HOME
    for _ in range(4):
        assert updated(made, chi, 1) == updated(other, chi, 1)
        assert made.fingerprint(made.current_plan()) == other.fingerprint(other.current_plan())


@pytest.mark.parametrize(("period", "move_s"), [(40, 0.3), (300, 3.0)])
def test_a_load_that_swings_by_a_fifth_of_a_ranks_speed_is_not_chased(period, move_s):
    """Units moved up to 15 times in 1,000 steps, and steps took 1 % longer than without balancing."""
    cluster = Cluster(
        chi=lambda step: [1.0, 1.0, 1.0, 1.2 if step // (period // 2) % 2 else 1.0],
        rest_s=0.2,
        gemm_s=0.8,
        cost=COST,
        migration=MigrationCost(0.02, 0.1),
        noise=Noise(0.03, correlation=0.5),
        segments=SEGMENTS,
        bytes_of_units=1e6,
        move=MoveCost(0.0, move_s),
        moving_rest=0.2,
    )
    done = simulate(BalanceConfig(update_every=5), cluster, 1000)
    assert len(done.moves) <= 2
    assert sum(done.step_s) <= 1.007 * sum(unbalanced_step_s(cluster, 1000))
