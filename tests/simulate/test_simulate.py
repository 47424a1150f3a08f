"""The simulator against what can be told by hand, and what it says of the controller."""

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.simulated.scenario import NOISES
from scripts.simulated.training import Cluster, settling, simulate, unbalanced_step_s
from zeroresize.config import BalanceConfig
from zeroresize.policy.tensor.costs import ResizingCost

LINEAR = ResizingCost.linear(0.9)


def cluster(*chis, **changes):
    return Cluster(**{"chi": lambda step: chis, "rest_s": 0.2, "gemm_s": 0.8, "cost": LINEAR, **changes})


def test_a_step_takes_as_long_as_its_slowest_rank():
    result = simulate(BalanceConfig(mode="off"), cluster(1.0, 3.0), 20)
    assert result.step_s == pytest.approx([0.2 + 3.0 * 0.8] * 20)
    assert result.pruned_share == 0.0


@pytest.mark.parametrize("noise", ["white", "correlated", "bursts"])
def test_steps_without_balancing_are_those_of_mode_off(noise):
    slow = cluster(chi=lambda step: (1.0, 3.0 if 20 <= step < 50 else 1.0), noise=NOISES[noise](0.05), seed=2)
    assert unbalanced_step_s(slow, 80) == simulate(BalanceConfig(mode="off"), slow, 80).step_s


@pytest.mark.parametrize("reads_late", [False, True])
@pytest.mark.parametrize("chi", [2.0, 3.0, 4.0])
def test_a_straggler_that_recovers_right_after_it_began_to_prune_is_let_go_at_once(chi, reads_late):
    """The interval in which it begins to prune is also that in which its speed changes."""
    brief = cluster(chi=lambda step: (1.0, chi if 50 <= step < 70 else 1.0), reads_late=reads_late)
    straggler = [update[1] for update in simulate(BalanceConfig(mode="zero-rd"), brief, 200).ratios]
    assert straggler[6] > 0.3
    assert max(straggler[9:]) == 0.0


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("reads_late", [False, True])
@pytest.mark.parametrize("chi", [2.0, 4.0, 8.0])
def test_a_cost_that_no_calibration_foresaw_does_not_make_the_ratio_swing_for_ever(chi, reads_late):
    """Small ratios cost more than nothing at all."""
    truth = ResizingCost(LINEAR.ratios, (1.0, 1.05, 1.0, 0.85, 0.6, 0.3), (0.0,) * 6)
    for seed in range(3):
        slow = cluster(1.0, chi, rest_s=0.1, gemm_s=0.9, cost=truth, noise=0.02, seed=seed, reads_late=reads_late)
        result = simulate(BalanceConfig(mode="zero-rd"), slow, 1500, believed_cost=LINEAR)
        reachable_s = max(1.0, 0.1 + 0.9 * chi * 0.3)
        assert statistics.mean(result.step_s[500:]) <= 1.12 * reachable_s


def test_a_forced_ratio_costs_what_the_cost_says():
    cost = ResizingCost((0.0, 0.5, 0.9), (1.0, 0.6, 0.2), (0.0, 0.1, 0.1))
    forced = BalanceConfig(mode="zero-rd", ratio=0.5, ranks=(1,))
    result = simulate(forced, cluster(1.0, 2.0, cost=cost), 10)
    assert result.step_s == pytest.approx([0.2 + 2.0 * 0.8 * 0.6 + 0.1] * 10)
    assert result.pruned_share == pytest.approx(0.25)


@pytest.mark.slow
@settings(deadline=None)
@given(st.floats(2.0, 8.0), st.sampled_from([2, 4, 8]), st.sampled_from(["mean", "min"]))
def test_a_straggler_reaches_its_target_by_the_third_update(chi, num_ranks, target):
    chis = [1.0] * (num_ranks - 1) + [chi]
    result = simulate(BalanceConfig(mode="zero-rd", target=target), cluster(*chis), 60)
    fastest_s, slowest_s = 1.0, 0.2 + 0.8 * chi
    reference_s = fastest_s if target == "min" else ((num_ranks - 1) * fastest_s + slowest_s) / num_ranks
    floor_s = 0.2 + 0.8 * chi * 0.1
    expected_s = pytest.approx(max(fastest_s, reference_s, floor_s), rel=0.02)
    at_full_work = [seconds for seconds in result.step_s[30:] if seconds != expected_s]
    assert at_full_work == pytest.approx([slowest_s] * len(at_full_work)) and len(at_full_work) <= 1


def test_a_wrong_calibration_does_not_make_the_ratio_swing():
    truth = ResizingCost((0.0, 0.45, 0.9), (1.0, 0.65, 0.2), (0.0, 0.05, 0.05))
    result = simulate(BalanceConfig(mode="zero-rd"), cluster(1.0, 4.0, cost=truth), 300, believed_cost=LINEAR)
    ratios = [update[1] for update in result.ratios]
    assert settling(ratios, 3, len(ratios))[1] <= 0.05


@pytest.mark.parametrize("chi", [1.5, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("slope", [0.8, 0.85, 0.9, 1.0, 1.2])
def test_a_wrong_calibration_does_not_make_a_straggler_start_and_stop_for_ever(slope, chi):
    """Where pruning really saves γ and the calibration says slope · γ."""
    ratios = LINEAR.ratios
    believed = ResizingCost(ratios, tuple(max(1 - slope * ratio, 0.05) for ratio in ratios), (0.0,) * len(ratios))
    slow = cluster(1.0, chi, rest_s=0.5, gemm_s=1.0, noise=0.02)
    result = simulate(BalanceConfig(mode="zero-rd"), slow, 400, believed_cost=believed)
    assert sum(result.step_s[100:]) / 300 <= 1.1 * 1.5


@pytest.mark.parametrize("chi", [1.5, 2.0, 4.0, 8.0])
def test_steps_at_full_work_cost_a_hundredth(chi):
    result = simulate(BalanceConfig(mode="zero-rd"), cluster(1.0, chi), 3000)
    usual_s = statistics.median(result.step_s[100:])
    full = [seconds for seconds in result.step_s[100:] if seconds > 1.2 * usual_s]
    assert full == pytest.approx([0.2 + 0.8 * chi] * len(full)) and len(full) >= 3
    assert 1.005 < statistics.mean(result.step_s[100:]) / usual_s <= 1.0105


@pytest.mark.parametrize("slope", [0.7, 0.85, 1.0, 1.1])
@pytest.mark.parametrize("chi", [2.0, 4.0])
def test_a_straggler_that_recovers_slowly_is_let_go_whatever_the_calibration_said(slope, chi):
    """χ falls over 600 steps, by so little an update that nothing jumps."""
    ratios = LINEAR.ratios
    believed = ResizingCost(ratios, tuple(max(1 - slope * ratio, 0.05) for ratio in ratios), (0.0,) * len(ratios))
    falling = Cluster(
        chi=lambda step: (1.0, max(chi - (chi - 1.0) * max(step - 100, 0) / 600, 1.0)),
        rest_s=0.2,
        gemm_s=0.8,
        cost=LINEAR,
        noise=0.02,
    )
    result = simulate(BalanceConfig(mode="zero-rd"), falling, 900, believed_cost=believed)
    straggler = [update[1] for update in result.ratios]
    assert min(straggler[3:30]) > 0.2
    assert max(straggler[75:]) == 0.0, "half of the tolerance of 10 % is reached at step 670 at the latest"


def test_steps_at_full_work_show_what_no_change_of_the_ratio_would():
    """Small ratios bring nothing here, and the straggler recovers slowly, so that only little is ever pruned anew."""
    truth = ResizingCost(LINEAR.ratios, (1.0, 0.97, 0.9, 0.6, 0.35, 0.15), (0.0,) * 6)
    falling = cluster(chi=lambda step: (1.0, max(2.5 - max(step - 100, 0) / 400, 1.0)), cost=truth, noise=0.02)
    result = simulate(BalanceConfig(mode="zero-rd"), falling, 1200, believed_cost=LINEAR)
    straggler = [update[1] for update in result.ratios]
    assert min(straggler[3:30]) > 0.4
    assert max(straggler[90:]) == 0.0


@given(st.integers(0, 8), st.floats(0.2, 0.9))
def test_settling_counts_updates_after_the_change(late, ratio):
    """γ that is still 0 at the third update is not steady from there on, however steady it is later."""
    trace = [0.0] * 5 + [0.0] * late + [ratio] * 20
    assert settling(trace, 5, len(trace)) == (late + 1, pytest.approx(ratio if late > 2 else 0.0))


def test_a_ratio_that_wanders_is_not_steady():
    assert settling([0.5, 0.5, 0.5, 0.5, 0.7, 0.5, 0.5, 0.5, 0.5, 0.5], 0, 10) == (6, pytest.approx(0.2))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("chi", [2.0, 4.0, 8.0])
def test_a_straggler_that_comes_and_goes_is_met_within_three_updates(chi, noise, num_ranks):
    """Also one that is another rank each epoch of eight updates; γ is steady within 0.05 from then on."""
    config = BalanceConfig(mode="zero-rd")
    once = cluster(chi=lambda step: [1.0] * (num_ranks - 1) + [chi if 40 <= step < 160 else 1.0], noise=noise)
    robin = cluster(
        chi=lambda step: [chi if (step // 80) % num_ranks == r else 1.0 for r in range(num_ranks)], noise=noise
    )
    constant, by_turns = simulate(config, once, 240).ratios, simulate(config, robin, 320).ratios
    for ratios, rank, change, until in (
        (constant, -1, 4, 16), (constant, -1, 16, 24), (by_turns, 0, 0, 8), (by_turns, 0, 8, 16), (by_turns, 1, 8, 16)
    ):  # fmt: skip
        updates, swing = settling([update[rank] for update in ratios], change, until)
        assert updates <= 3 and swing <= 0.05


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(6))
def test_noise_of_a_tenth_neither_holds_a_straggler_back_nor_lets_it_wander(num_ranks, seed):
    """A rank that has recovered is measured at full work before any of what it did under pruning counts again."""
    chi = lambda step: [1.0] * (num_ranks - 1) + [4.0 if 40 <= step < 160 else 1.0]  # noqa: E731
    ratios = simulate(BalanceConfig(mode="zero-rd"), cluster(chi=chi, noise=0.1, seed=seed), 240).ratios
    for change, until in ((4, 16), (16, 24)):
        updates, swing = settling([update[-1] for update in ratios], change, until)
        assert updates <= 3 and swing <= 0.05


@pytest.mark.parametrize("chi", [1.2, 1.4, 1.6])
def test_a_rank_that_is_slow_for_an_interval_only_is_left_alone(chi):
    """As ranks of shared machines are, now and then."""
    brief = cluster(chi=lambda step: (1.0, chi if 50 <= step < 60 else 1.0))
    assert max(update[1] for update in simulate(BalanceConfig(mode="zero-rd"), brief, 200).ratios) == 0.0


@pytest.mark.parametrize("chi", [1.2, 1.4, 1.6])
def test_a_rank_that_stays_a_little_slow_prunes_from_the_third_update_on(chi):
    ratios = simulate(
        BalanceConfig(mode="zero-rd"), cluster(chi=lambda step: (1.0, chi if step >= 50 else 1.0)), 200
    ).ratios
    assert settling([update[1] for update in ratios], 5, 20)[0] == 3 and ratios[-1][1] > 0.0


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_straggler_of_drifting_speed_costs_little_more_than_its_own_drift(num_ranks):
    """χ between 1 and 4 over 320 steps: decisions are two updates late, in which it drifts by at most 0.6."""
    drifting = cluster(chi=lambda step: [1.0] * (num_ranks - 1) + [2.5 + 1.5 * math.sin(2 * math.pi * step / 320)])
    result = simulate(BalanceConfig(mode="zero-rd"), drifting, 640)
    assert statistics.mean(result.step_s[40:]) <= 1.0 + 0.8 * 0.6
