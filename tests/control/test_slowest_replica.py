"""What counts of the numbers that a rank and its data-parallel replicas send."""

import math

from zeroresize.control.group_decision import RankNumbers, _of_slowest
from zeroresize.policy.tensor.costs import ResizingCost
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.memory import HeldBytes

COST = ResizingCost((0.0, 0.5, 0.9), (1.0, 0.6, 0.2), (0.0, 0.01, 0.02), 1.25, 1.5)


def numbers(busy_s, wait_s=0.1, fingerprint=5.0, held=(7.0, 8.0)):
    times = RankTimes(0.25 * busy_s, 0.75 * busy_s, 1.0, COST, 0.01, 0.3, 0.002)
    return RankNumbers(fingerprint, wait_s, HeldBytes(*held), times)


def test_what_is_sent_is_what_arrives():
    assert RankNumbers.from_row(numbers(1.0).to_row()) == numbers(1.0)


def test_the_slowest_replica_counts_with_the_shortest_wait_and_the_most_bytes():
    assert _of_slowest([numbers(1.0)]) == numbers(1.0)
    for busy_s in ((1.0, 3.0, 2.0), (3.0, 1.0, 2.0), (2.0, 1.0, 3.0)):
        merged = _of_slowest([numbers(one, wait_s) for one, wait_s in zip(busy_s, (0.3, 0.2, 0.4), strict=True)])
        assert merged == numbers(3.0, 0.2)
    merged = _of_slowest([numbers(3.0, held=(1.0, 9.0)), numbers(1.0, held=(2.0, 8.0))])
    assert merged == numbers(3.0, held=(2.0, 9.0))


def test_where_one_knows_no_times_nobody_does_and_what_is_unknown_or_differs_stays_seen():
    for unknown in (-1.0, math.inf, math.nan):
        assert not 0.0 < _of_slowest([numbers(1.0), numbers(unknown)]).times.gemm_s < math.inf
    assert math.isnan(_of_slowest([numbers(1.0), numbers(2.0, math.nan)]).wait_s)
    assert math.isnan(_of_slowest([numbers(1.0), numbers(2.0, fingerprint=6.0)]).fingerprint)
