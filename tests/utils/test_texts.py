"""Ranks that differ are told by what each has; the majority is taken to be right only where there is one."""

import math

import pytest

from zeroresize.utils.texts import (
    alike,
    at_fault,
    by_rank,
    digits,
    duration_text,
    lists_by_rank,
    minority,
    size_text,
)


@pytest.mark.parametrize(
    ("values", "groups", "few"),
    [
        ([1, 2], [[0], [1]], []),
        ([1, 2, 1], [[0, 2], [1]], [1]),
        ([2, 1, 1], [[0], [1, 2]], [0]),
        ([1, 1, 2, 2], [[0, 1], [2, 3]], []),
        ([1, 2, 3, 1], [[0, 3], [1], [2]], []),
        ([math.nan, math.nan, 1.0], [[0], [1], [2]], []),
        ([math.nan, 1.0, 1.0], [[0], [1, 2]], [0]),
    ],
)
def test_only_more_than_half_of_the_ranks_are_a_majority(values, groups, few):
    assert alike(values) == groups
    assert minority(groups) == few
    assert ("look at" in at_fault(groups)) == bool(few)


def test_ranks_of_the_job_are_named_by_their_numbers():
    assert alike([1, 2, 1], [4, 6, 8]) == [[4, 8], [6]]
    assert by_rank(["a", "b", "a"], [4, 6, 8]) == "ranks 4, 8: a; rank 6: b"


def test_of_lists_only_what_differs_is_told():
    assert lists_by_rank([["a", "b"], ["a", "c", "d"]]) == (
        "rank 0: 2, not on all ranks: b; rank 1: 3, not on all ranks: c, d"
    )
    assert lists_by_rank([["a"], ["a", "b"], ["a"]]) == "ranks 0, 2: 1; rank 1: 2, not on all ranks: b"
    assert "in different orders" in lists_by_rank([["a", "b"], ["b", "a"]])


@pytest.mark.parametrize("value", [0.0123, 1.234, 99.96, 100.4, 999.6, 14780.0, 9.9e5, 9.99e7, -14780.0])
def test_a_number_has_no_exponent_and_at_least_so_many_digits_that_count(value):
    for count in (3, 4, 5):
        text = digits(value, count)
        assert "e" not in text and float(text) == pytest.approx(value, rel=0.5 * 10 ** (1 - count))


def test_sizes_and_durations_come_in_the_unit_that_a_person_would_take():
    sizes = {0.0: "0 B", 812.0: "812 B", 999.6: "1 kB", 999_700.0: "1 MB", 38e6: "38 MB", 2.5e13: "25 TB"}
    assert {size: size_text(size) for size in sizes} == sizes
    assert size_text(1.24e12, "FLOP/s") == "1.24 TFLOP/s"
    durations = {
        0.0: "0 ms", 1.9e-5: "19 µs", 0.00042: "420 µs", 0.0021: "2.1 ms", 0.3104: "310 ms", 0.9996: "1 s",
        12.44: "12.4 s", 59.99: "1 min 0 s", 123.0: "2 min 3 s", 14_780.0: "4 h 6 min", -0.5: "−500 ms",
    }  # fmt: skip
    assert {seconds: duration_text(seconds) for seconds in durations} == durations
    assert duration_text(math.nan) == "?"
