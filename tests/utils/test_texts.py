"""Ranks that differ are told by what each has; the majority is taken to be right only where there is one."""

import math

import pytest

from zeroresize.utils.texts import alike, at_fault, by_rank, lists_by_rank, minority


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
