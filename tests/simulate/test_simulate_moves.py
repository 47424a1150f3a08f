"""What moving ownership is to do in a simulated cluster, in mode "exact" and beside pruning."""

import statistics

import pytest

from scripts.simulated.cluster import Cluster
from scripts.simulated.training import simulate
from zeroresize.config import BalanceConfig
from zeroresize.plan.ownership import SegmentWork
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost

LINEAR = ResizingCost.linear(0.9)
#: A feed-forward part and one of many heads: so fine that whole units are no matter.
SEGMENTS = (SegmentWork(16384, 8, 0.65), SegmentWork(4096, 1, 0.35))
REST_S, GEMM_S = 0.08, 0.92
#: Of half a rank's units: half a step.
MOVE = MoveCost(0.8, 0.1)
#: So much that nobody lends.
DEAR = MigrationCost(5.0, 5.0)
EXACT, NEVER = BalanceConfig(), BalanceConfig(moves=False)


def cluster(chi, **changes):
    values = {
        "rest_s": REST_S,
        "gemm_s": GEMM_S,
        "cost": LINEAR,
        "migration": MigrationCost(0.01, 0.05),
        "segments": SEGMENTS,
        "bytes_of_units": 1.0,
        "move": MOVE,
        "noise": 0.02,
        "comparison_error": 0.01,
    }
    return Cluster(chi, **(values | changes))


def last_is_slow(num_ranks, chi, since=0, until=10**9):
    return lambda step: [1.0] * (num_ranks - 1) + [chi if since <= step < until else 1.0]


def bound_s(num_ranks, chi):
    """T*."""
    return REST_S + GEMM_S * num_ranks / (num_ranks - 1 + 1 / chi)


@pytest.mark.parametrize(("chi", "num_ranks", "noise"), [(2.0, 8, 0.02), (4.0, 4, 0.0), (4.0, 2, 0.05), (8.0, 8, 0.05)])
def test_units_go_where_they_are_computed_fast_and_come_home(chi, num_ranks, noise):
    run = simulate(EXACT, cluster(last_is_slow(num_ranks, chi, 100, 400), noise=noise), 700)
    home = (1.0,) * num_ranks
    assert run.owned[9] == home and run.owned[-1] == home
    away = [own for own in run.owned if own != home]
    assert all(own[-1] < min(own[:-1]) for own in away)
    assert 20 <= len(away) <= 34
    there, *_, back = [step for step, *_ in run.moves]
    assert 100 < there <= 200 and 400 < back <= 450
    assert len(run.moves) <= 3


def test_without_segments_all_is_as_without_moves():
    slow = last_is_slow(4, 4.0, 50, 200)
    with_none = simulate(EXACT, cluster(slow, segments=()), 300)
    never, migrating = (simulate(config, cluster(slow), 300) for config in (NEVER, BalanceConfig(mode="mig")))
    assert with_none == never == migrating


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("num_ranks", "update_every", "every"),
    [
        (2, 5, 20),
        *(pytest.param(*own, marks=pytest.mark.slow) for own in ((2, 10, 20), (2, 10, 40), (2, 5, 5), (8, 10, 5))),
    ],
)
def test_a_straggler_that_changes_place_sooner_than_it_is_followed_is_left_alone(num_ranks, update_every, every):
    """Moves cost next to nothing, but each comes when half of a turn is over, and is wrong for half of the next one."""
    chi = lambda step: [4.0 if step // every % num_ranks == rank else 1.0 for rank in range(num_ranks)]  # noqa: E731
    turning = cluster(chi, move=MoveCost(0.25, 0.0), migration=DEAR)
    never, ours = (
        simulate(BalanceConfig(moves=moves, update_every=update_every), turning, 1600) for moves in (False, True)
    )
    assert statistics.fmean(ours.step_s) <= 1.02 * statistics.fmean(never.step_s)


def test_who_stays_slow_is_relieved_though_another_comes_and_goes_meanwhile():
    def chi(step):
        slow = {0} if 50 <= step < 150 or step >= 400 else set()
        slow |= {1} if step >= 200 and step % 40 < 20 else set()
        return [4.0 if rank in slow else 1.0 for rank in range(4)]

    run = simulate(BalanceConfig(update_every=5), cluster(chi, move=MoveCost(80.0, 0.0), migration=DEAR), 1000)
    assert any(400 < step <= 600 for step, *_ in run.moves)
    assert statistics.fmean(run.step_s[600:]) <= 2.2


def test_a_move_takes_its_time_before_the_step_that_it_is_for():
    run = simulate(EXACT, cluster(last_is_slow(2, 4.0), noise=0.0, move=MoveCost(1.0, 3.0)), 1200)
    (step, num_bytes, seconds), *_ = run.moves
    assert num_bytes == pytest.approx(1.0 - 0.4, abs=0.02) and seconds == 3.0 + num_bytes
    assert run.step_s[step] == pytest.approx(bound_s(2, 4.0) + seconds, rel=0.02)
    assert run.move_s == pytest.approx(sum(own for *_, own in run.moves))


def test_ranks_meet_after_every_segment():
    """Two heads a rank: the slow one gives one away, and somebody who has three then is waited for there only."""
    coarse = (SegmentWork(4096, 8, 0.5), SegmentWork(8, 1, 0.5))
    slow = cluster(last_is_slow(4, 2.5), noise=0.0, segments=coarse, moving_rest=0.2, migration=DEAR)
    run = simulate(EXACT, slow, 400)
    shares = run.owned[-1]
    assert shares != (1.0,) * 4
    # Heads: the slow rank keeps one of two, and somebody has three.
    heads_s = 0.5 * max(REST_S * 1.1 + 1.5 * GEMM_S, REST_S * 0.9 + 0.5 * 2.5 * GEMM_S)
    neurons_s = 0.5 * bound_s(4, 2.5)
    assert run.step_s[-1] == pytest.approx(heads_s + neurons_s, rel=0.01)
