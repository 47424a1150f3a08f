"""The controller in a closed loop of virtual ranks, and update by update."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from helpers.states import resumed
from helpers.virtual_training import LINEAR, REALISTIC

from zeroresize.config import BalanceConfig
from zeroresize.plan.group import Workshares
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes
from zeroresize.policy.tensor.estimation.estimator import RankEstimator
from zeroresize.policy.tensor.estimation.times import RankTimes, StepTimes

#: What a group tells in which lending costs nothing.
FREE = CollectiveTimes(math.nan, (), MigrationCost())


def rank(rest_s, gemm_s, cost=LINEAR, gather_fill_scale=1.0):
    return RankTimes(rest_s, gemm_s, gather_fill_scale, cost)


class SimulatedRank:
    """A rank whose products take χ times their time; tells what it would measure under a ratio."""

    def __init__(self, rest_s=0.3, gemm_s=0.7, cost=REALISTIC, noise=None, believed=None):
        self.rest_s, self.gemm_s, self.cost, self.chi = rest_s, gemm_s, cost, 1.0
        self._estimate = RankEstimator(believed or cost)
        self._noise = noise or (lambda: 1.0)

    def measure(self, ratio, num_calibration_steps):
        full = [self._step(0.0) for _ in range(num_calibration_steps)]
        steps = full + [self._step(ratio) for _ in range(10 - num_calibration_steps)]
        self._estimate.learn(steps)
        return self._estimate.times

    def _step(self, ratio):
        truth = rank(self.rest_s * self._noise(), self.gemm_s * self.chi * self._noise(), self.cost)
        gemm_s = truth.gemm_s * self.cost.gemm_share_at(ratio)
        return StepTimes(truth.busy_at(ratio), gemm_s, self.cost.gather_fill_at(ratio), Workshares(ratio))


def run_closed_loop(config, ranks, chi_at_update, num_updates):
    """γ of every rank after every update; what is measured in an interval is decided on one update later."""
    controller = Controller(config, len(ranks))
    plan, posted, trace = controller.initial_plan(), None, []
    for update in range(num_updates):
        for rank_number, simulated in enumerate(ranks):
            simulated.chi = chi_at_update(update).get(rank_number, 1.0)
        calibration = controller.num_calibration_steps
        measured = [r.measure(p.pruned, calibration) for r, p in zip(ranks, plan.ranks, strict=True)]
        if posted is not None:
            plan = controller.update(posted)
        posted = measured
        trace.append([p.pruned for p in plan.ranks])
    return np.array(trace)


def test_off_measures_but_never_prunes():
    controller = Controller(BalanceConfig(mode="off"), 2)
    plan = controller.update([rank(0.3, 0.7), rank(0.3, 5.6)])
    assert [p.pruned for p in plan.ranks] == [0.0, 0.0]
    assert [p.is_straggler for p in plan.ranks] == [False, True]


def test_forced_ratio_on_named_ranks_holds_from_the_start_and_whatever_is_measured():
    controller = Controller(BalanceConfig(mode="zero-rd", ratio=0.5, ranks=[1]), 3)
    assert [p.pruned for p in controller.initial_plan().ranks] == [0.0, 0.5, 0.0]
    plan = controller.update([rank(0.3, 5.6), rank(0.3, 0.7), rank(0.3, 0.7)])
    assert [p.pruned for p in plan.ranks] == [0.0, 0.5, 0.0]


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
        plan = controller.update([unsure(chi, deviation) for chi in (1.0, 1.0, 1.0, 1.3)], FREE)
    assert bool(plan.relieved) == is_relieved


def test_a_straggler_of_which_little_is_known_any_more_is_let_go():
    controller = Controller(BalanceConfig(mode="zero-pri"), 4)
    normal = [unsure(1.0, 0.01)] * 3
    for _ in range(2):
        plan = controller.update([*normal, unsure(4.0, 0.01)])
    assert plan.relieved == [3]
    assert controller.update([*normal, unsure(3.5, 0.3)]).relieved == [3], "slow in any case"
    assert controller.update([*normal, unsure(1.2, 0.3)]).relieved == []


@pytest.mark.parametrize("mode", ["zero-pri", "mig", "semi"])
def test_noise_changes_no_plan(mode):
    generator = np.random.default_rng(0)
    controller = Controller(BalanceConfig(mode=mode), 4)
    plans = []
    for _ in range(60):
        chis = np.array([1.0, 1.0, 1.0, 3.0]) * (1.0 + 0.005 * generator.standard_normal(4))
        plans.append(controller.update([unsure(chi, 0.005) for chi in chis], FREE).ranks)
    assert sum(one != other for one, other in itertools.pairwise(plans[2:])) <= 1


def test_a_receiver_that_is_slow_for_a_moment_goes_on_receiving():
    controller = Controller(BalanceConfig(mode="mig"), 4)
    times = [unsure(chi, 0.01) for chi in (1.0, 1.0, 1.0, 3.0)]
    for _ in range(3):
        before = controller.update(times, FREE)
    assert before.loans
    assert controller.update([times[0], unsure(1.3, 0.01), *times[2:]], FREE).loans == before.loans
    for _ in range(4):
        later = controller.update([times[0], unsure(1.3, 0.01), *times[2:]], FREE)
    assert later.loans != before.loans


@pytest.mark.parametrize("noise", [0.05, 0.1])
def test_pruning_that_brings_nothing_any_more_ends_also_where_times_are_noisy(noise):
    """A straggler's slowness moves from its products to the rest of its step, where pruning saves little."""
    for seed in range(4):
        generator = np.random.default_rng(seed)
        draw = lambda: max(1.0 + noise * generator.standard_normal(), 0.1)  # noqa: E731, B023
        ranks = [SimulatedRank(rest_s=0.08, gemm_s=0.92, noise=draw) for _ in range(4)]

        def chi_at(update, ranks=ranks):
            if update == 36:
                ranks[3].rest_s = 16.0
            return {3: 4.0} if update < 36 else {}

        trace = run_closed_loop(BalanceConfig(mode="zero-rd"), ranks, chi_at, 56)
        assert trace[30:36, 3].min() > 0.5
        assert trace[46:, 3].max() == 0.0


def lending(chis=(1, 1, 1, 4), deviation=0.0, seen=FREE):
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
    others += [lending(seen=CollectiveTimes(0.125, (0.0,) * 4, MigrationCost()))]
    others += [lending(seen=CollectiveTimes(0.0, (0.0,) * 4, MigrationCost(1e-9, 1e-9)))]
    numbers = [
        controller.fingerprint(plan),
        controller.fingerprint(plan, 1),
        controller.fingerprint(dataclasses.replace(plan, predicted_step_s=1.0)),
        *(made.fingerprint(plan) for made, _ in others),
    ]
    assert len(set(numbers)) == len(numbers)
    controller.update([RankTimes(0.3, 0.7 * chi, 1.0, ResizingCost.linear(0.9)) for chi in (1, 1, 1, 4)], FREE)
    assert controller.fingerprint(plan) not in numbers, "how long ranks were slow shows"
