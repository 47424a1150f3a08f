"""A rank computes equally much in every segment, as far as it has it, and prunes what it is to prune in all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.tensor.rules.sharing import pruned_by_segment

SEGMENT = st.tuples(st.floats(0.0, 3.0), st.floats(0.01, 1.0))


@given(st.lists(SEGMENT, min_size=1, max_size=6), st.floats(0.0, 0.5), st.floats(0.0, 0.45))
def test_what_is_pruned_is_divided_so_that_no_segment_takes_longer_than_it_must(segments, pruned, lent):
    owned, works = zip(*segments, strict=True)
    by_segment = pruned_by_segment(pruned, lent, owned, works)
    whole = sum(share * work for share, work in segments)
    assert all(0.0 <= share <= 1.0 - lent + 1e-9 for share in by_segment)
    in_all = sum(ratio * share * work for ratio, (share, work) in zip(by_segment, segments, strict=True))
    assert in_all == pytest.approx(pruned * whole, abs=1e-6)
    computed = [share * (1.0 - lent - ratio) for ratio, share in zip(by_segment, owned, strict=True)]
    level = max(computed)
    for ratio, share in zip(by_segment, computed, strict=True):
        assert ratio == 0.0 or share == pytest.approx(level, rel=1e-6, abs=1e-9)


def test_equal_segments_prune_just_what_is_asked_for():
    assert pruned_by_segment(0.3, 0.1, (0.7, 0.7, 0.7), (0.2, 0.3, 0.5)) == (0.3, 0.3, 0.3)
    assert pruned_by_segment(0.0, 0.1, (0.7, 1.7), (0.2, 0.3)) == (0.0, 0.0)
