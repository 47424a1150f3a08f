"""Who is slow, and how much: schedules, and what χ may be."""

import pytest

from zeroresize.injection import round_robin, static
from zeroresize.injection.schedule import checked_chi


def test_round_robin_makes_each_rank_slow_in_turn():
    schedule = round_robin(chi=3.0)
    assert [schedule(epoch, 3) for epoch in range(4)] == [{0: 3.0}, {1: 3.0}, {2: 3.0}, {0: 3.0}]
    assert round_robin()(0, 2) == {0: 2.0}


def test_static_keeps_the_stragglers_and_zero_means_one():
    assert static({0: 8, 1: 6})(5, 2) == {0: 8, 1: 6}
    assert checked_chi({0: 0, 1: 2.5}, 2) == {0: 1.0, 1: 2.5}


@pytest.mark.parametrize(
    ("chi", "message"),
    [
        ({2: 4.0}, r"chi=\{2: 4.0\}: rank 2 .* allowed are 0 to 1"),
        ({-1: 4.0}, "rank -1"),
        ({"0": 4.0}, "rank '0'"),
        ({0: 0.5}, r"chi=\{0: 0.5\} is not allowed.*at least 1"),
        ({0: -2.0}, "at least 1"),
        ({0: float("nan")}, "finite"),
        ({0: float("inf")}, "finite"),
        ({0: True}, "finite"),
        ({0: "4"}, "finite"),
        (4.0, "mapping of rank to χ"),
    ],
)
def test_wrong_chi_is_named(chi, message):
    with pytest.raises(ValueError, match=message):
        checked_chi(chi, 2)
