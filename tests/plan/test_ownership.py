"""What ranks own, as numbers that everything else relies on."""

import itertools

import pytest

from zeroresize.plan.ownership import SegmentWork, owned_shares


@pytest.mark.parametrize("num_blocks", [1, 12, 23, 24, 32, 80])
def test_even_shares_and_nothing_are_exact_however_works_add_up(num_blocks):
    """Shares of work are rounded; a rank with a rounding error of units would be asked for its speed by its steps."""
    sizes = [size for _ in range(num_blocks) for size in (3.0 * 192 * 96, 192.0 * 768)]
    segments = [SegmentWork(8, 1, size / sum(sizes)) for size in sizes]
    assert owned_shares((1.0,) * 4, segments) == (1.0,) * 4
    for shares in itertools.permutations((1.0, 1.0, 2.0, 0.0)):
        owned = owned_shares(shares, segments)
        assert [share == 0.0 for share in owned] == [share == 0.0 for share in shares]
        assert sum(owned) == pytest.approx(4.0, abs=1e-5)
