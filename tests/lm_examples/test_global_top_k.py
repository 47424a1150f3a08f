"""The k largest of all ranks' numbers are those that one rank with all of them would choose."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_examples.cases.global_top_k import global_top_k

CPU = torch.device("cpu")
#: Few different ones, so that many are equal, and such whose bit patterns differ in one digit only.
NUMBERS = [0.0, -0.0, 1.0, -1.0, 1.0000001, 1.0 + 1e-12, 3.5, -3.5, 1e-45, 1e30, -math.inf, 2.0**-126]


def undistributed(numbers, k):
    keep = torch.zeros(len(numbers), dtype=torch.bool)
    keep[numbers.abs().sort(descending=True, stable=True).indices[:k]] = True
    return keep


def check_one(rank, group, numbers, pieces_by_rank, k):
    """``pieces_by_rank``: sizes of each rank's tensors, which are ``numbers`` one after another."""
    pieces = list(numbers.split([size for sizes in pieces_by_rank for size in sizes]))
    expected = list(undistributed(numbers, k).split([len(one) for one in pieces]))
    begin = sum(len(sizes) for sizes in pieces_by_rank[:rank])
    end = begin + len(pieces_by_rank[rank])
    masks = global_top_k(pieces[begin:end], k, group, CPU)
    assert [one.tolist() for one in masks] == [one.tolist() for one in expected[begin:end]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_numbers_on_one_rank(run_ranks, dtype):
    def check(rank, group):
        @settings(max_examples=100, database=None)
        @given(st.lists(st.sampled_from(NUMBERS) | st.floats(allow_nan=False, width=32), max_size=20), st.data())
        def check_all(numbers, data):
            k = data.draw(st.integers(0, len(numbers)))
            check_one(rank, group, torch.tensor(numbers, dtype=dtype), [[len(numbers)]], k)

        check_all()

    run_ranks(check, 1)


@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, torch.float64), (3, torch.float32)])
def test_numbers_of_several_ranks_with_many_ties(run_ranks, num_ranks, dtype):
    """Some ranks have no tensors, some empty ones."""

    def check(rank, group):
        random = np.random.default_rng(0)
        for _ in range(60):
            sizes = [random.integers(0, 8, random.integers(0, 4)).tolist() for _ in range(num_ranks)]
            numbers = random.choice(random.choice(NUMBERS, random.integers(1, 5)), sum(map(sum, sizes)))
            k = int(random.integers(0, len(numbers) + 1))
            check_one(rank, group, torch.tensor(numbers, dtype=dtype), sizes, k)

    run_ranks(check, num_ranks)


@pytest.mark.few(1)
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
        numbers = torch.tensor([[math.inf, 1.0], [2.0, -math.nan]][rank])
        return [one.tolist() for one in global_top_k([numbers], 2, group, CPU)]

    assert run_ranks(check, 2) == [[[True, False]], [[False, True]]]


def test_every_rank_hears_of_what_does_not_fit(run_ranks):
    def check(rank, group):
        numbers = [torch.ones(2 * rank)]
        with pytest.raises(ValueError, match="k=3 is not allowed: all ranks together have 2 numbers"):
            global_top_k(numbers, 3, group, CPU)
        with pytest.raises(ValueError, match=r"by rank it is \[1, 2\]"):
            global_top_k(numbers, 1 + rank, group, CPU)

    run_ranks(check, 2)
