"""All ranks' curves at once: the very numbers that each rank's own times tell, to the last bit."""

import numpy as np
import pytest
from helpers.virtual_training import LINEAR, REALISTIC
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.tensor.costs import ResizingCost
from zeroresize.policy.tensor.estimation.curves import Curves, GroupTimes
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.sharing import borrowed_shares, loans_of, predicted_busy_s

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


@given(groups, shares)
def test_curves_are_those_of_every_rank(times, asked):
    """Also of ranks that were measured at different numbers of points."""
    curves = Curves.of(times)
    asked = np.array([asked] * len(times))
    ratios = np.minimum(asked, 1.0)
    rows = list(zip(times, ratios.tolist(), strict=True))
    assert curves.busy_at(ratios).tolist() == [[rank.busy_at(one) for one in row] for rank, row in rows]
    assert curves.gemm_share_at(ratios).tolist() == [
        [rank.cost.gemm_share_at(one) for one in row] for rank, row in rows
    ]
    borrowed = [[rank.cost.borrowed_at(one) for one in row] for rank, row in zip(times, asked.tolist(), strict=True)]
    assert curves.borrowed_at(asked).tolist() == borrowed
    assert curves.busy_at_points.min(axis=1).tolist() == [rank.least_busy_s for rank in times]


@given(groups, seconds)
def test_the_ratio_that_reaches_a_time_is_every_ranks_own(times, target_s):
    reaching = GroupTimes(times).curves.ratios_to_reach(target_s).tolist()
    assert reaching == pytest.approx([rank.ratio_to_reach(target_s) for rank in times], abs=1e-12)


@given(groups, st.data())
def test_busy_times_of_a_division_are_every_ranks_own(times, data):
    num_ranks = len(times)
    lent = [data.draw(st.sampled_from([0.0, 0.0, 0.25, 0.5])) for _ in times]
    lent[-1] = 0.0
    capacities = data.draw(st.none() | st.lists(st.floats(0.1, 3.0), min_size=num_ranks, max_size=num_ranks))
    loans = loans_of(lent, capacities)
    borrowed = borrowed_shares(loans, num_ranks)
    assert predicted_busy_s(times, lent, loans) == [
        rank.busy_at(ratio) + rank.gemm_s * rank.cost.borrowed_at(extra)
        for rank, ratio, extra in zip(times, lent, borrowed, strict=True)
    ]
    assert sum(borrowed) == np.float64(sum(lent)) or abs(sum(borrowed) - sum(lent)) < 1e-9


@given(st.floats(0.05, 3.0), st.floats(0.0, 0.95))
def test_times_of_what_a_rank_owns_say_what_it_takes_spared_of_that(owned, ratio):
    """What the estimator fits to steps is what decisions predict."""
    rank = RankTimes(0.4, 1.6, 1.5, REALISTIC, moving_rest=0.3)
    rest_s = 0.4 * (1.0 - 0.3 * (1.0 - owned))
    points = REALISTIC.ratios
    ratio = points[round(ratio * (len(points) - 1))]  # between them both are lines
    expected_s = rest_s + 1.6 * REALISTIC.executed_at(owned, ratio) + 1.5 * owned * REALISTIC.gather_fill_at(ratio)
    assert rank.owning(owned).busy_at(ratio) == pytest.approx(expected_s)
    curves = Curves([rank])
    assert curves.owning_s(np.array([[owned]]), np.array([[ratio]])).item() == pytest.approx(expected_s)
    assert rank.owning(1.0) is rank


@given(st.floats(0.05, 1.0), st.floats(0.0, 0.9))
def test_what_a_narrow_rank_borrows_takes_as_long_as_at_home(owned, part):
    rank, borrowed = RankTimes(0.4, 1.6, 1.0, LINEAR), part * owned
    narrow = rank.owning(owned)
    assert narrow.gemm_s * narrow.cost.borrowed_at(borrowed / owned) == pytest.approx(
        1.6 * LINEAR.borrowed_at(borrowed)
    )
