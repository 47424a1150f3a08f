"""What no comparison with the others shows: all ranks slower than they were, and waits that are longer for nobody."""

import math

import numpy as np
import pytest

from zeroresize.policy.slowness.group_slowness import GroupSlowness, PastSlowness, SlownessEvent, SlowRank, WatchReport
from zeroresize.policy.slowness.lines import lines_of
from zeroresize.policy.slowness.surroundings import GpuState, Place, Surroundings
from zeroresize.policy.slowness.windows import StepWindow

EVERY = 10
ALL, PAIR = Place("all ranks", 0, 4), Place("all ranks", 0, 2)
PARTS = {"loader": 0.003, "products": 0.009, "rest": 0.001, "work": math.nan, "inputs": 1000.0, "link": 0.002}


class Run:
    """Rounds of ranks whose steps take as long as ``parts_of(rank, round)`` says; those who are early wait for all."""

    def __init__(self, num_ranks, noise=0.0, places=()):
        self.group = GroupSlowness(num_ranks, nodes=[f"n{rank}" for rank in range(num_ranks)])
        self.places = places or (Place("all ranks", 0, num_ranks),)
        self.num_ranks, self.noise, self.number = num_ranks, noise, 0
        self.draw, self.lines = np.random.default_rng(0), []

    def rounds(self, number, parts_of=lambda rank, number: {}):
        """Return the lines that these rounds bring."""
        before = len(self.lines)
        for _ in range(number):
            self.number += 1
            parts = [{**PARTS, **parts_of(rank, self.number)} for rank in range(self.num_ranks)]
            for each in parts:
                factor = math.exp(self.draw.normal(0.0, self.noise)) if self.noise else 1.0
                each.setdefault("busy", factor * (each["loader"] + each["products"] + each["rest"]))
            latest_s = max(each["busy"] for each in parts)
            waits_s = [latest_s - each["busy"] + each["link"] for each in parts]
            step_s = latest_s + max(each["link"] for each in parts)
            end = self.number * EVERY
            windows = [
                StepWindow(end, EVERY, p["busy"], step_s, p["loader"], p["products"], p["work"], p["inputs"])
                for p in parts
            ]
            around = [Surroundings({place: seconds}) for seconds in waits_s for place in self.places]
            events = self.group.update(windows, [Surroundings.of_numbers(each.as_numbers()) for each in around])
            self.lines += lines_of(events, self.group.report(), compares_work=self.group.compares_work)
        return self.lines[before:]


@pytest.mark.parametrize("num_slow", [3, 4])
def test_what_slows_most_ranks_alike_is_a_single_line_and_another_when_it_is_over(num_slow):
    run = Run(4, noise=0.002)
    assert run.rounds(60) == []
    assert run.group.report().past_scores == pytest.approx((1.0,) * 4, rel=0.01)
    (begins,) = run.rounds(20, lambda rank, _: {"products": 0.0142 if rank < num_slow else 0.009})
    who = "all 4 ranks" if num_slow == 4 else "3 of 4 ranks"
    assert begins.startswith(f"{who} take 1.35 times as long as until step 600: mostly matrix products")
    assert "check clocks and cooling of n0, n1, …" in begins
    report = run.group.report()
    (past,) = report.past
    assert past.ranks == tuple(range(num_slow)) and past.cause == "products" and report.slow == ()
    assert past.num_steps == 200 and report.past_scores[0] == pytest.approx(1 / 1.4, rel=0.02)
    (ends,) = run.rounds(40)
    assert ends.startswith(f"{who} are as fast as until step 600 again: they took 1.35 times as long for 200 steps")
    assert run.group.report().past == ()


def test_a_single_slow_rank_is_told_by_the_others_alone_and_its_own_past_stays_what_it_was():
    run = Run(2, noise=0.002)
    run.rounds(60)
    begins, ends = run.rounds(100, lambda rank, _: {"products": 0.027 if rank == 1 else 0.009}) + run.rounds(60)
    assert begins.startswith("rank 1 is 2.38 times slower than the others") and "rank 1 is as fast as" in ends
    run.rounds(100, lambda rank, _: {"products": 0.027 if rank == 1 else 0.009})
    assert run.group.report().past_scores == pytest.approx((1.0, 1 / 2.38), rel=0.05)


@pytest.mark.parametrize("times", [1.05, 4.0])
def test_longer_waits_though_nobody_is_late_are_the_link(times):
    run, says = Run(2, noise=0.002), "ranks 0, 1 wait longer for collectives of all ranks; check the network of n0, n1"
    run.rounds(60)
    (begins,) = run.rounds(20, lambda *_: {"link": 0.002 + 0.015 * (times - 1.0)})
    assert begins == f"steps take {times:.2f} times as long as until step 600: {says}"
    (ends,) = run.rounds(40)
    assert ends.startswith("steps are as fast as until step 600 again")


def test_of_two_groups_that_is_told_in_which_all_wait_longer():
    """Whoever waits for the ranks of a slow link does so in the collectives of all, where these come last."""
    group = GroupSlowness(4)
    pairs = [Place("ranks 0, 1", 0, 2), Place("ranks 2, 3", 2, 2)]
    events = []
    for number in range(1, 91):
        link_s = 0.01 if number > 60 else 0.001
        windows = [StepWindow(number * EVERY, EVERY, 0.02, 0.022 + link_s, 0.0, math.nan) for _ in range(4)]
        around = [Surroundings({pairs[0]: 0.001, ALL: 0.001 + link_s - 0.001}) for _ in range(2)]
        around += [Surroundings({pairs[1]: link_s, ALL: 0.001}) for _ in range(2)]
        events += group.update(windows, around)
    (begins,) = events
    assert (begins.slow.place, begins.slow.ranks) == ("collectives of ranks 2, 3", (2, 3))


@pytest.mark.parametrize(
    "parts_of",
    [
        lambda rank, number: {"products": 0.018, "inputs": 2000.0} if number > 60 else {},  # a larger batch
        lambda rank, number: {"products": 0.018, "work": 2.0} if number > 60 else {"work": 1.0},
        lambda rank, number: {"products": 0.004, "work": 0.5} if number > 60 else {"work": 1.0},  # with a fixed part
        lambda rank, number: {key: PARTS[key] * (1.0 + number / 50) for key in ("products", "inputs")},  # longer rows
        lambda rank, number: {key: PARTS[key] * (1.0 + number * 7 % 11) for key in ("products", "inputs")},
        lambda rank, number: {"products": 0.018, "work": 2.0} if rank == 1 else {"work": 1.0},  # on one rank
        # Rows that are a little longer, where time grows with their square, and a little less work with a fixed part.
        lambda rank, number: {"products": 0.0117, "inputs": 1090.0} if number > 60 else {},
        lambda rank, number: {"work": 0.905} if number > 60 else {"work": 1.0},
        lambda rank, number: {"products": 0.018, "inputs": 2000.0} if number < 20 else {},  # warm-up
        lambda rank, number: {key: PARTS[key] * (2.0 if number < 8 else 1.0) for key in ("products", "loader")},
    ],
)
def test_other_work_is_no_slowness(parts_of):
    run = Run(2, noise=0.005)
    assert run.rounds(200, parts_of) == [] and run.group.report().past == ()


def test_after_other_work_the_past_is_learned_anew():
    run = Run(2, noise=0.002)
    run.rounds(60)
    assert run.rounds(60, lambda *_: {"products": 0.018, "inputs": 2000.0}) == []
    (line,) = run.rounds(20, lambda *_: {"products": 0.036, "inputs": 2000.0})
    assert line.startswith("all 2 ranks take 1.75 times as long as until step 1200")


def waiting(waits_s_of, num_ranks=2, step_s_of=lambda is_late: 0.022 + 0.01 * is_late):
    """Return the lines of rounds in which ranks wait as long as ``waits_s_of`` says, otherwise from round 60 on."""
    group, lines = GroupSlowness(num_ranks), []
    for number in range(1, 91):
        step_s = step_s_of(number > 60)
        windows = [StepWindow(number * EVERY, EVERY, 0.02, step_s, 0.0, math.nan) for _ in range(num_ranks)]
        around = [Surroundings(waits_s_of(rank, number > 60)) for rank in range(num_ranks)]
        lines += lines_of(group.update(windows, around), group.report(), compares_work=True)
    return lines


@pytest.mark.parametrize(
    "place",
    [Place("rank 5 of the job"), Place("group tp", 0, 4), Place(""), Place("group pp", 0, 1)],
    ids=["a peer", "a group of others, too", "unknown", "alone"],
)
def test_what_others_may_be_late_for_that_are_not_watched_is_no_link(place):
    assert waiting(lambda rank, is_late: {place: 0.012 if is_late else 0.002}) == []


def test_waits_that_are_longer_in_one_group_and_shorter_in_another_are_no_link():
    def waits_s_of(rank, is_late):
        return {PAIR: 0.012 if is_late else 0.002, Place("group dp", 0, 2): 0.002 if is_late else 0.012}

    assert waiting(waits_s_of, step_s_of=lambda _: 0.034) == []


def test_a_group_of_which_not_all_tell_their_waits_is_passed_over():
    """Who comes last may wait longer in three other places."""
    assert waiting(lambda rank, is_late: {ALL: 0.012 if is_late else 0.002} if rank else {}, num_ranks=4) == []


def test_many_links_are_a_single_line():
    def waits_s_of(rank, is_late):
        return {Place(f"group {rank // 2}", rank - rank % 2, 2): 0.012 if is_late else 0.002}

    (line,) = waiting(waits_s_of, num_ranks=16)
    assert "; and 7 others alike; check the network of its node" in line


def test_groups_of_a_name_are_one_and_those_ranks_are_told_that_wait_longer():
    def waits_s_of(rank, is_late):
        return {Place("group tp", rank - rank % 2, 2): 0.012 if is_late and rank in (4, 5) else 0.002}

    (line,) = waiting(waits_s_of, num_ranks=16)
    assert "ranks 4, 5 wait longer for collectives of group tp" in line


def test_windows_without_timed_products_do_not_hide_them():
    """As where numbers are exchanged more often than products are timed."""
    run = Run(2)
    run.rounds(60, lambda _, number: {} if number % 5 else {"products": math.nan, "busy": 0.013})
    run.rounds(20, lambda *_: {"products": 0.018})
    assert run.group.report().past[0].cause == "products"


@pytest.mark.parametrize("noise", [0.002, 0.02, 0.1])
def test_noise_alone_tells_nothing(noise):
    for num_ranks in (2, 3, 8):
        run = Run(num_ranks, noise)
        draw = np.random.default_rng(1)
        assert run.rounds(500, lambda *_, draw=draw: {"link": 0.002 * math.exp(draw.normal(0.0, 0.5))}) == []


def test_surroundings_travel_as_equally_many_numbers():
    places = {
        Place("group dp_replicate of all mine", 8, 2): 0.3,
        Place("rank 1 of the job"): 0.2,
        Place(""): 0.1,
        ALL: 0.01,
    }
    gpu = GpuState("heat", 87.0, 0.6)
    numbers = Surroundings(places, gpu).as_numbers()
    assert len(numbers) == len(Surroundings().as_numbers())
    received = Surroundings.of_numbers(numbers)
    assert received.gpu == gpu
    assert list(received.waits_s.values()) == [0.3, 0.2, 0.1]
    assert [str(place) for place in received.waits_s] == [
        "collectives of group dp_replicate of al",
        "rank 1 of the job",
        "collectives",
    ]
    assert Surroundings.of_numbers(Surroundings().as_numbers()) == Surroundings()


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        ([None, GpuState("heat", 87.0, 0.6)], "its GPU is throttled at 87 °C; check the cooling of n1"),
        ([GpuState("", 60.0, 1.0), GpuState("power", 70.0, 0.7)], "throttled for power; check power supply and limits"),
        (
            [GpuState("power", 60.0, 0.9), GpuState("power", 70.0, 0.6)],
            "products take longer, its GPU at 60 % of its cl",
        ),
        (
            [GpuState("", 60.0, 1.0), GpuState("power", 60.0, 1.0)],
            ": matrix products take longer; check clocks and cool",
        ),
    ],
)
def test_a_line_tells_the_next_step_by_cause_and_state_of_the_gpu_in_200_characters(gpus, says):
    group, lines = GroupSlowness(2, nodes=["n0", "n1"]), []
    for number in range(1, 31):
        late_s = 0.01 if number > 20 else 0.0
        windows = [StepWindow(number * EVERY, EVERY, 0.02, 0.02 + late_s, 0.0, 0.01)]
        windows += [StepWindow(number * EVERY, EVERY, 0.02 + late_s, 0.02 + late_s, 0.0, 0.01 + late_s)]
        around = [Surroundings({PAIR: late_s}, gpus[0]), Surroundings({}, gpus[1])]
        events = group.update(windows, around)
        lines += lines_of(events, group.report(), compares_work=True)
    (line,) = lines
    assert says in line and len(f"step 12345678: {line}") <= 200
    if gpus[1].clock == 1.0:  # the line has room for it
        assert "; rank 0 waits 33 % for collectives of all ranks" in line


def test_no_line_is_longer_than_200_characters():
    far, many = 12345678, tuple(range(1000, 2000))
    gpus = tuple(GpuState("power", 70.0, 0.62 if rank == 1999 else 1.0) for rank in range(2000))
    numbers = dict.fromkeys(("scores", "busy_s"), (1.0,) * 2000) | dict.fromkeys(
        ("step_s", "cost_s", "share_saved"), 1.0
    )
    report = WatchReport(far, 2000, (), **numbers, nodes=("n" * 60,) * 2000, gpus=gpus)
    place = "collectives of " + "n" * 24
    slow = [SlowRank(1999, 12.34, far, far, far, cause, {}, far) for cause in ("products", "rest", "loader", "compute")]
    slow += [PastSlowness(12.34, far, far, many, "link", place), PastSlowness(12.34, far, far, many, "rest")]
    for kind in ("begins", "changes", "ends"):
        for number in (1, 3):
            for each in slow:
                lines = lines_of([SlownessEvent(kind, each, 12.35)] * number, report, compares_work=False)
                assert all(len(f"step {far}: {line}") <= 200 for line in lines)
