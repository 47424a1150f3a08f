"""The k largest of all ranks' numbers are those that one rank with all of them would choose."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_examples.cases.global_top_k import global_top_k

CPU = torch.device("cpu")
#: Few different ones, so that many are equal, and such whose bit patterns differ in one digit only.
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, 3.5, -3.5, 1e-45, 1e30, -math.inf, 2.0**-126])


def undistributed(numbers, k):
    keep = torch.zeros(len(numbers), dtype=torch.bool)
    keep[numbers.abs().sort(descending=True, stable=True).indices[:k]] = True
    return keep


def split_over_ranks(numbers, cuts, num_ranks):
    """A list of tensors for each rank; some have none, some empty ones."""
    bounds = [0, *sorted(min(one, len(numbers)) for one in cuts), len(numbers)]
    pieces = [numbers[begin:end] for begin, end in itertools.pairwise(bounds)]
    firsts = [rank * len(pieces) // num_ranks for rank in range(num_ranks + 1)]
    return [pieces[begin:end] for begin, end in itertools.pairwise(firsts)]


@pytest.mark.parametrize(("num_ranks", "dtype"), [(1, torch.float32), (3, torch.float32), (2, torch.float64)])
def test_any_numbers_with_many_ties(run_ranks, num_ranks, dtype):
    def check(rank, group):
        @settings(derandomize=True, max_examples=60, database=None)  # every rank must draw the same
        @given(st.lists(NUMBERS, max_size=40), st.lists(st.integers(0, 40), max_size=5), st.floats(0, 1))
        def check_all(numbers, cuts, share):
            whole = torch.tensor(numbers, dtype=dtype)
            k = round(share * len(whole))
            pieces = split_over_ranks(whole, cuts, num_ranks)
            masks = global_top_k(pieces[rank], k, group, CPU)
            assert [one.shape for one in masks] == [one.shape for one in pieces[rank]]
            begin = sum(len(one) for of_rank in pieces[:rank] for one in of_rank)
            own = torch.cat([torch.zeros(0, dtype=torch.bool), *masks])
            assert torch.equal(own, undistributed(whole, k)[begin : begin + len(own)])

        check_all()

    run_ranks(check, num_ranks)


@pytest.mark.parametrize("dtypes", [[torch.float32] * 4, [torch.bfloat16, torch.float32, torch.float64, torch.float16]])
def test_large_matrices_of_any_dtype_on_four_ranks(run_ranks, dtypes):
    def check(rank, group):
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(4, 3, 50, 7, generator=generator)[number].to(one) for number, one in enumerate(dtypes)]
        numbers = torch.cat([one.flatten().double() for one in whole])
        for k in (0, 1, 1000, len(numbers) - 1, len(numbers)):
            masks = global_top_k(list(whole[rank]), k, group, CPU)
            expected = undistributed(numbers, k).view(4, 3, 50, 7)[rank]
            assert torch.equal(torch.stack(masks), expected)

    run_ranks(check, 4)


def test_nan_counts_as_the_largest(run_ranks):
    def check(rank, group):
        own = torch.tensor([[math.inf, 1.0], [2.0, -math.nan]][rank])
        return [one.tolist() for one in global_top_k([own], 2, group, CPU)]

    assert run_ranks(check, 2) == [[[True, False]], [[False, True]]]


def test_every_rank_hears_of_what_does_not_fit(run_ranks):
    def check(rank, group):
        own = [torch.ones(2 * rank)]
        with pytest.raises(ValueError, match="k=3 is not allowed: all ranks together have 2 numbers"):
            global_top_k(own, 3, group, CPU)
        with pytest.raises(ValueError, match=r"by rank it is \[1, 2\]"):
            global_top_k(own, 1 + rank, group, CPU)

    run_ranks(check, 2)
