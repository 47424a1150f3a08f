"""Transfer plans: complete, disjoint, nothing that is already there, and no more than must be sent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.plan.ownership import OwnershipMap, transfer_plan


@st.composite
def two_maps(draw):
    ranks = draw(st.integers(1, 6))
    units = draw(st.integers(1, 40))
    owners = st.lists(st.integers(0, ranks - 1), min_size=units, max_size=units)
    return tuple(OwnershipMap(np.array(draw(owners), dtype=np.int64), ranks) for _ in range(2))


@given(two_maps())
def test_carrying_out_a_plan_gives_the_new_map_and_sends_only_what_changes_owners(maps):
    before, after = maps
    plan = transfer_plan(before, after)
    owners = before.owners.copy()
    for (source, destination), units in plan.items():
        assert source != destination and len(units) and np.all(np.diff(units) > 0)
        assert np.all(before.owners[units] == source)
        owners[units] = destination
    assert np.array_equal(owners, after.owners)
    sent = sum(map(len, plan.values()))
    assert sent == np.count_nonzero(before.owners != after.owners)  # the lower bound where nobody holds copies
    assert list(plan) == sorted(plan)


def test_maps_of_other_units_or_ranks_are_an_error():
    even = OwnershipMap.even(8, 2)
    for other in (OwnershipMap.even(10, 2), OwnershipMap.even(8, 4)):
        with pytest.raises(ValueError, match="cannot follow"):
            transfer_plan(even, other)
