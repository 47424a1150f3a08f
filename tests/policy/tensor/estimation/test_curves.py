"""All ranks' curves at once: the numbers that each rank's own times tell."""

import numpy as np
import pytest
from helpers.virtual_training import REALISTIC
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.tensor.costs import ResizingCost
from zeroresize.policy.tensor.estimation.curves import GroupTimes
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.sharing import WorkDivision

seconds = st.floats(1e-3, 1e3)


@st.composite
def costs(draw):
    inner = draw(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=6, unique=True))
    ratios = (0.0, *sorted(inner))
    share = st.floats(1e-6, 2.0)
    return ResizingCost(
        ratios,
        (1.0, *(draw(share) for _ in inner)),
        (0.0, *(draw(st.floats(0.0, 1.0)) for _ in inner)),
        draw(st.floats(0.1, 3.0)),
    )


groups = st.lists(st.builds(RankTimes, seconds, seconds, st.floats(0.0, 10.0), costs()), min_size=1, max_size=6)
shares = st.lists(st.floats(0.0, 1.5), min_size=1, max_size=5)


@given(groups, shares, st.data())
def test_curves_and_busy_times_are_those_of_every_rank(times, asked, data):
    """Also of ranks that were measured at different numbers of points."""
    times, asked = GroupTimes(times), np.array([asked] * len(times))
    ratios = np.minimum(asked, 1.0)
    rows = list(zip(times, ratios.tolist(), asked.tolist(), strict=True))
    busy_s = [[rank.busy_at(ratio) for ratio in ratios] for rank, ratios, _ in rows]
    assert times.busy_at(ratios) == pytest.approx(np.array(busy_s), rel=1e-12)
    borrowing_s = [[rank.gemm_s * rank.cost.borrowed_at(share) for share in shares] for rank, _, shares in rows]
    assert times.borrowing_s(asked) == pytest.approx(np.array(borrowing_s), rel=1e-12)
    assert times.busy_at_points.min(axis=1) == pytest.approx([rank.least_busy_s for rank in times], rel=1e-12)
    lent = [data.draw(st.sampled_from([0.0, 0.0, 0.25, 0.5])) for _ in times]
    lent[-1] = 0.0
    slack = data.draw(st.none() | st.tuples(*[st.floats(0.1, 3.0)] * len(times)))
    division = WorkDivision((0.0,) * len(times), tuple(lent), slack)
    borrowed = division.borrowed(times.owned)
    assert sum(borrowed) == pytest.approx(sum(lent))
    assert division.busy_s(times) == pytest.approx(
        [
            rank.busy_at(ratio) + rank.gemm_s * rank.cost.borrowed_at(extra)
            for rank, ratio, extra in zip(times, lent, borrowed, strict=True)
        ],
        rel=1e-12,
    )


@given(groups, seconds)
def test_the_ratio_that_reaches_a_time_is_the_least_that_does(times, target_s):
    for rank, ratio in zip(times, GroupTimes(times).ratios_to_reach(target_s).tolist(), strict=True):
        if rank.least_busy_s > target_s:
            assert rank.busy_at(ratio) == pytest.approx(rank.least_busy_s)
        else:
            assert rank.busy_at(ratio) <= target_s * (1.0 + 1e-9)
            assert all(
                rank.busy_at(less) >= target_s * (1.0 - 1e-9) for less in np.linspace(0.0, ratio, 20) if less < ratio
            )


@given(st.floats(0.05, 3.0), st.floats(0.0, 0.95))
def test_times_of_what_a_rank_owns_say_what_it_takes_spared_of_that(owned, ratio):
    """What the estimator fits to steps is what decisions predict."""
    rank = RankTimes(0.4, 1.6, 1.5, REALISTIC, moving_rest=0.3)
    rest_s = 0.4 * (1.0 - 0.3 * (1.0 - owned))
    points = REALISTIC.ratios
    ratio = points[round(ratio * (len(points) - 1))]  # between them both are lines
    expected_s = rest_s + 1.6 * REALISTIC.executed_at(owned, ratio) + 1.5 * owned * REALISTIC.gather_fill_at(ratio)
    assert rank.owning(owned).busy_at(ratio) == pytest.approx(expected_s)
    assert GroupTimes([rank]).busy_at(np.array([[ratio]]), np.array([[owned]])).item() == pytest.approx(expected_s)
    assert rank.owning(1.0) is rank
