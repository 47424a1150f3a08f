"""How many columns a share is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.column_order import ALIGNMENT, num_lent


@given(st.integers(2, 4096), st.floats(0.0, 1.0))
def test_a_loan_that_was_decided_leaves_something_to_tell_the_owners_speed_by(num_columns, ratio):
    decided = num_lent(num_columns, ratio, is_forced=False)
    assert 0 <= decided < num_columns
    if num_columns >= 2 * ALIGNMENT:
        assert num_columns - decided >= ALIGNMENT
    assert decided == pytest.approx(min(ratio * num_columns, num_columns - ALIGNMENT), abs=0.025 * num_columns + 8.5)


@given(st.integers(1, 4096), st.floats(0.0, 1.0))
def test_a_forced_loan_is_kept_to_the_column(num_columns, ratio):
    assert num_lent(num_columns, ratio) == pytest.approx(ratio * num_columns, abs=0.5 + 1e-9)
