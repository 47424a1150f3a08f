"""The simulator against what can be told by hand, and what it says of the controller."""

import statistics

import pytest

from scripts.simulated.cluster import Cluster
from scripts.simulated.figures import settling
from scripts.simulated.scenario import NOISES
from scripts.simulated.training import simulate, unbalanced_step_s
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


def test_a_forced_ratio_costs_what_the_cost_says():
    cost = ResizingCost((0.0, 0.5, 0.9), (1.0, 0.6, 0.2), (0.0, 0.1, 0.1))
    forced = BalanceConfig(mode="zero-rd", ratio=0.5, ranks=(1,))
    result = simulate(forced, cluster(1.0, 2.0, cost=cost), 10)
    assert result.step_s == pytest.approx([0.2 + 2.0 * 0.8 * 0.6 + 0.1] * 10)
    assert result.pruned_share == pytest.approx(0.25)


@pytest.mark.parametrize("chi", [1.5, 4.0])
@pytest.mark.parametrize("slope", [0.8, 0.9, 1.2])
def test_a_wrong_calibration_does_not_make_a_straggler_start_and_stop_for_ever(slope, chi):
    """Where pruning really saves γ and the calibration says slope · γ."""
    ratios = LINEAR.ratios
    believed = ResizingCost(ratios, tuple(max(1 - slope * ratio, 0.05) for ratio in ratios), (0.0,) * len(ratios))
    slow = cluster(1.0, chi, rest_s=0.5, gemm_s=1.0, noise=0.02)
    result = simulate(BalanceConfig(mode="zero-rd"), slow, 400, believed_cost=believed)
    assert sum(result.step_s[100:]) / 300 <= 1.1 * 1.5


@pytest.mark.parametrize("chi", [1.5, 8.0])
def test_steps_at_full_work_cost_a_hundredth(chi):
    result = simulate(BalanceConfig(mode="zero-rd"), cluster(1.0, chi), 3000)
    usual_s = statistics.median(result.step_s[100:])
    full = [seconds for seconds in result.step_s[100:] if seconds > 1.2 * usual_s]
    assert full == pytest.approx([0.2 + 0.8 * chi] * len(full)) and len(full) >= 3
    assert 1.005 < statistics.mean(result.step_s[100:]) / usual_s <= 1.0105


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("seed", range(4))
def test_noise_of_a_tenth_neither_holds_a_straggler_back_nor_lets_it_wander(num_ranks, seed):
    """A rank that has recovered is measured at full work before any of what it did under pruning counts again."""
    chi = lambda step: [1.0] * (num_ranks - 1) + [4.0 if 40 <= step < 160 else 1.0]  # noqa: E731
    ratios = simulate(BalanceConfig(mode="zero-rd"), cluster(chi=chi, noise=0.1, seed=seed), 240).ratios
    for change, until in ((4, 16), (16, 24)):
        updates, swing = settling([update[-1] for update in ratios], change, until)
        assert updates <= 3 and swing <= 0.05
