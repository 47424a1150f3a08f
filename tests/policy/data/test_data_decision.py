"""When global batches are divided otherwise: once that pays, back when it is over, never for noise."""

import math
import random

import pytest

from zeroresize.policy.data.decision import BY_SPEED, EVEN, DataDecision, RankWindow
from zeroresize.policy.data.division import Division
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.slowness.windows import StepWindow

STEPS = 10


class Job:
    """Ranks of some speeds that train by a decision, in simulated seconds."""

    def __init__(self, num_ranks, global_batch, *, fixed_s=0.1, noise=0.0, lag=4, seed=0, length=1.0, squares=math.nan):
        self.even = Division.of_counts((1.0,) * num_ranks)
        self.decision, self.global_batch = DataDecision(self.even, global_batch), global_batch
        self.fixed_s, self.noise, self.lag, self.chance = fixed_s, noise, lag, random.Random(seed)
        self.length, self.squares = length, squares
        self.step, self.in_force, self.coming = 0, self.even, None
        self.total_s = self.off_s = 0.0

    def busy_s(self, counts, chis):
        each_s = 0.9 * len(counts) / self.global_batch
        return [chi * (self.fixed_s + each_s * count) for chi, count in zip(chis, counts, strict=True)]

    def run(self, num_windows, chis):
        """Windows of steps; returns the seconds of the last step."""
        for _ in range(num_windows):
            counts, seconds = self.in_force.counts(self.global_batch), []
            even_s = max(self.busy_s(self.even.counts(self.global_batch), chis))
            for _ in range(STEPS):
                if self.coming is not None and self.step >= self.coming[0]:
                    self.in_force, self.coming = self.coming[1], None
                    counts, seconds = self.in_force.counts(self.global_batch), []
                seconds.append(self.busy_s(counts, chis))
                self.total_s += max(seconds[-1])
                self.off_s += even_s
                self.step += 1
            rows = []
            for rank, count in enumerate(counts):
                usual = sorted(step[rank] for step in seconds)[len(seconds) // 4] * math.exp(
                    self.chance.gauss(0.0, self.noise)
                )
                work = count * float(self.in_force.work([self.length])[0])
                window = StepWindow(self.step, STEPS, usual, max(map(max, seconds)), 0.0, math.nan, work)
                rows.append(RankWindow(window, 0.0, 0.0, self.squares))
            proposal = self.decision.update(rows, self.lag)
            if self.coming is None and self.in_force.squares != self.decision.state.in_force.squares:
                self.coming = self.step + self.lag, self.decision.state.in_force
            if proposal is not None:
                self.decision.made(proposal, self.step + self.lag)
                self.coming = self.step + self.lag, proposal.division
        return max(self.busy_s(self.in_force.counts(self.global_batch), chis))


@pytest.mark.parametrize("chi", [1.3, 2.0, 4.0])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_slow_rank_is_given_fewer_samples_and_all_again_once_it_has_recovered(num_ranks, chi):
    job = Job(num_ranks, 64 * num_ranks, noise=0.003)
    assert job.run(5, [1.0] * num_ranks) == pytest.approx(1.0)
    chis = [1.0] * (num_ranks - 1) + [chi]
    settled_s = job.run(12, chis)
    fixed_s = [job.fixed_s * each for each in chis]
    pace_s = [0.9 / 64 * each for each in chis]
    best = Division(tuple(fixed_s), tuple(pace_s), 0.0, (math.inf,) * num_ranks).counts(job.global_batch)
    best_s = max(job.busy_s(best, chis))
    assert settled_s <= 1.03 * best_s
    assert job.decision.state.name == BY_SPEED
    assert job.run(30, [1.0] * num_ranks) == pytest.approx(1.0)


@pytest.mark.parametrize("chi", [2.0, 4.0])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("fixed_s", [0.3, 0.9])
def test_seconds_that_do_not_grow_with_samples_are_learned_so_ranks_with_few_are_not_thought_slow(
    num_ranks, chi, fixed_s
):
    job = Job(num_ranks, 64 * num_ranks, fixed_s=fixed_s, noise=0.01)
    job.run(5, [1.0] * num_ranks)
    chis = [1.0] * (num_ranks - 1) + [chi]
    settled_s = job.run(8, chis)
    of_last = range(num_ranks - 1, 64 * num_ranks // 2)
    best_s = min(
        max(job.busy_s([*[(64 * num_ranks - last) / (num_ranks - 1)] * (num_ranks - 1), last], chis))
        for last in of_last
    )
    assert settled_s <= 1.05 * best_s
    assert job.run(4, [1.0] * num_ranks) == pytest.approx(fixed_s + 0.9)


@pytest.mark.parametrize("squares", [math.nan, 1.0 / 500.0])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_samples_of_one_length_are_divided_as_if_nobody_had_said_it(num_ranks, squares):
    """Units of work are others then, and once it is learned what squares take."""
    known = {}, {"length": 500.0, "squares": squares}
    jobs = [Job(num_ranks, 64 * num_ranks, fixed_s=0.9, **each) for each in known]
    for num_windows, chi in ((5, 1.0), (10, 3.0), (10, 1.0), (10, 1.5)):
        seconds = [job.run(num_windows, [1.0] * (num_ranks - 1) + [chi]) for job in jobs]
        assert seconds[0] == pytest.approx(seconds[1])
        plain, of_lengths = (job.decision.state for job in jobs)
        assert of_lengths.fixed_work == pytest.approx(plain.fixed_work) and of_lengths.name == plain.name
        assert of_lengths.fixed_s == pytest.approx(plain.fixed_s)


@pytest.mark.parametrize("seed", range(4))
def test_of_work_that_differs_from_window_to_window_without_a_change_nothing_is_learned(seed):
    chance, decision = random.Random(seed), DataDecision(Division.of_counts((1.0, 1.0)), 16)
    for step in range(STEPS, 40 * STEPS, STEPS):
        works = [8.0 * math.exp(chance.gauss(0.0, 0.2)) for _ in range(2)]
        busy_s = [work * math.exp(chance.gauss(0.0, 0.05)) for work in works]
        windows = [
            StepWindow(step, STEPS, s, max(busy_s), 0.0, math.nan, w) for s, w in zip(busy_s, works, strict=True)
        ]
        decision.update([RankWindow(window, 0.0, 0.0, math.nan) for window in windows], 4, may_change=False)
        assert decision.state.fixed_work == 0.0


def test_ranks_that_are_others_after_a_state_was_loaded_tell_nothing_by_what_those_before_took():
    job = Job(2, 128)
    job.run(5, [1.0, 1.0])
    while job.coming is None:
        job.run(1, [1.0, 2.0])
    job.in_force, job.coming = job.decision.go_on_from(job.decision.state), None
    assert job.in_force.counts(128) == (85, 43)
    job.run(1, [2.0, 4.0])
    assert job.decision.state.fixed_work == 0.0 and not job.decision.state.contrasts


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_recovers_just_when_the_division_changes_is_soon_given_its_samples_again(num_ranks):
    job = Job(num_ranks, 64 * num_ranks, fixed_s=0.3, noise=0.01)
    job.run(5, [1.0] * num_ranks)
    while job.coming is None:
        job.run(1, [1.0] * (num_ranks - 1) + [2.0])
    assert job.run(8, [1.0] * num_ranks) == pytest.approx(1.2)
    assert job.decision.state.name == EVEN


@pytest.mark.parametrize("seed", range(5))
def test_noise_changes_nothing(seed):
    job = Job(4, 256, noise=0.02, seed=seed)
    job.run(600, [1.0] * 4)
    assert job.total_s <= 1.001 * job.off_s


@pytest.mark.parametrize("seed", range(5))
def test_random_spells_never_cost_more_than_off(seed):
    """Spells of slowness with lengths of Pareto's distribution, over 6,000 steps."""
    chance, job = random.Random(100 + seed), Job(4, 256, noise=0.005, seed=seed)
    left, chis = 0, [1.0] * 4
    for _ in range(600):
        if left <= 0:
            left = int(2.0 * chance.paretovariate(1.1))
            chis = [1.0] * 4
            if chance.random() < 0.5:
                chis[chance.randrange(4)] = 1.0 + 3.0 * chance.random()
        job.run(1, chis)
        left -= 1
    assert job.total_s <= 1.005 * job.off_s


def speeds_of_spell(kind, spell, chi):
    """What slows four ranks down in a spell: the last, or two, in every second one; in each another; or all alike."""
    slow = {"one": spell % 2 * [3], "two": spell % 2 * [2, 3], "another": [spell % 4], "all": spell % 2 * [0, 1, 2, 3]}
    return [chi if rank in slow[kind] else 1.0 for rank in range(4)]


@pytest.mark.parametrize("lag", [4, 12])
@pytest.mark.parametrize("chi", [1.3, 4.0])
@pytest.mark.parametrize("kind", ["one", "two", "another", "all"])
def test_speeds_that_change_again_and_again_never_cost_more_than_off(kind, chi, lag):
    """However long a spell lasts, and whenever a user looks, but in the first thousand steps."""
    for period in (1, 2, 3, 5, 8, 13, 50):
        job = Job(4, 256, noise=0.005, lag=lag, seed=period)
        for window in range(200):
            job.run(1, speeds_of_spell(kind, window // period, chi))
            assert window < 100 or job.total_s <= 1.01 * job.off_s, (period, window, job.total_s / job.off_s)


@pytest.mark.parametrize("seed", range(4))
def test_noise_of_five_percent_costs_a_percent_at_most(seed):
    job = Job(4, 256, noise=0.05, lag=12, seed=seed)
    job.run(400, [1.0] * 4)
    assert job.total_s <= 1.01 * job.off_s


def test_an_update_of_advice_alone_changes_nothing_and_says_what_it_would_do():
    decision = DataDecision(Division.of_counts((1.0, 1.0)), 16)
    for step in range(STEPS, 20 * STEPS, STEPS):
        windows = [StepWindow(step, STEPS, busy_s, 2.0, 0.0, math.nan, 8.0) for busy_s in (1.0, 2.0)]
        rows = [RankWindow(window, 0.0, 0.0, math.nan) for window in windows]
        assert decision.update(rows, 4, may_change=False) is None
    assert decision.verdict.is_due and decision.state.name == EVEN
    division, step_s, saving_s = decision.what_if()[BY_SPEED]
    assert division.counts(16) == (11, 5)
    assert step_s == pytest.approx(1.375) and saving_s == pytest.approx(0.625)


def test_what_disturbs_for_long_makes_changes_rare():
    """A change that takes as long as 300 steps, as where code is compiled anew, pays only for slowness that lasts."""
    decision = DataDecision(Division.of_counts((1.0, 1.0)), 16)
    decision.state.cost = MoveCost(0.0, 300.0)
    proposals = []
    for step in range(STEPS, 100 * STEPS, STEPS):
        windows = [StepWindow(step, STEPS, busy_s, 2.0, 0.0, math.nan, 8.0) for busy_s in (1.0, 2.0)]
        rows = [RankWindow(window, 0.0, 0.0, math.nan) for window in windows]
        if (proposal := decision.update(rows, 0)) is not None:
            proposals.append(step)
            decision.made(proposal, step)
            break
    assert 600.0 / 0.625 * 0.9 <= proposals[0] <= 600.0 / 0.625 * 1.1
