"""Units of tensors, bounds of shares, and what ranks own by them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.plan.layout import Layout, TensorSpec, UnitDivision, unit_bounds
from zeroresize.plan.ownership import SegmentWork, owned_shares

SHARES = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)


@given(st.integers(0, 200), SHARES)
def test_bounds_hold_every_unit_once_and_nothing_where_the_share_is_nothing(num_units, shares):
    bounds = unit_bounds(num_units, shares)
    counts = np.diff(bounds)
    assert bounds[0] == 0 and bounds[-1] == num_units and len(bounds) == len(shares) + 1
    assert (counts >= 0).all() and not counts[np.array(shares) == 0].any()


@given(st.integers(1, 8), SHARES.filter(lambda shares: len(shares) <= 4))
def test_the_rank_that_takes_longest_takes_as_short_as_possible(num_units, shares):
    def slowest(counts):
        return max(count / share if count else 0.0 for count, share in zip(counts, shares, strict=True))

    choices = [range(num_units + 1) if share else [0] for share in shares]
    best = min(slowest(counts) for counts in itertools.product(*choices) if sum(counts) == num_units)
    assert slowest(np.diff(unit_bounds(num_units, shares))) == pytest.approx(best, rel=1e-12)


@given(st.integers(1, 64), st.integers(1, 50), st.floats(1e-3, 1e3))
def test_equal_shares_of_what_divides_are_equal(num_ranks, each, share):
    assert np.diff(unit_bounds(num_ranks * each, [share] * num_ranks)).tolist() == [each] * num_ranks


def test_what_does_not_fit_is_an_error():
    for shares in ([], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")], [[1.0]]):
        with pytest.raises(ValueError, match="finite numbers, none negative, not all zero"):
            unit_bounds(4, shares)
    for division in (UnitDivision(0, 4, 3), UnitDivision(2, 4, 3), UnitDivision(-1, 4, 2)):
        with pytest.raises(ValueError, match="are not dimension"):
            TensorSpec("weight", 0, (36, 8), 2, division)


def test_a_tensor_knows_its_units_and_what_so_many_of_them_are():
    qkv = TensorSpec("qkv", 0, (36, 8), 2, UnitDivision(0, 4, 3, num_parts=3))
    assert (qkv.num_units, qkv.num_bytes, qkv.unit_bytes) == (4, 576, 144)
    assert qkv.local_shape(1) == (9, 8) and qkv.local_shape(0) == (0, 8) and qkv.local_shape(4) == qkv.shape
    down = TensorSpec("down", 0, (8, 12), 4, UnitDivision(1, 6, 2))
    assert down.local_shape(3) == (8, 6)
    norm = TensorSpec("norm", 0, (8,), 4)
    assert (norm.num_units, norm.unit_bytes) == (1, 32)
    assert norm.local_shape(1) == (8,) and norm.local_shape(0) == (0,)


def test_bytes_of_ranks_are_those_of_their_units():
    tensors = [TensorSpec("weight", 0, (6, 2), 4, UnitDivision(0, 3, 2)), TensorSpec("norm", 0, (5,), 4)]
    layout = Layout(np.array([[0, 1, 0], [0, 0, 0]]), np.array([[1, 3, 0], [1, 1, 0]]), np.array([0, 0, -1]))
    assert layout.rank_bytes(tensors).tolist() == [16 + 20, 32 + 20, 0]
    assert (layout.num_tensors, layout.num_ranks, layout.num_replicas) == (2, 3, 1)
    assert layout.units_of(0, 1) == range(1, 3) and not layout.units_of(0, 2)


@pytest.mark.parametrize("num_blocks", [1, 23, 80])
def test_even_shares_and_nothing_are_exact_however_works_add_up(num_blocks):
    """Shares of work are rounded; a rank with a rounding error of units would be asked for its speed by its steps."""
    sizes = [size for _ in range(num_blocks) for size in (3.0 * 192 * 96, 192.0 * 768)]
    segments = [SegmentWork(8, 1, size / sum(sizes)) for size in sizes]
    assert owned_shares((1.0,) * 4, segments) == (1.0,) * 4
    for shares in itertools.permutations((1.0, 1.0, 2.0, 0.0)):
        owned = owned_shares(shares, segments)
        assert [share == 0.0 for share in owned] == [share == 0.0 for share in shares]
        assert sum(owned) == pytest.approx(4.0, abs=1e-5)
