"""The k largest of all ranks' numbers are those that a rank with all of them would choose."""

import math

import numpy as np
import torch

from lm_examples.cases.pruning import global_top_k

#: Few different ones, so that many are equal, and such whose bit patterns differ in a digit only.
NUMBERS = [0.0, -0.0, 1.0, -1.0, 1.0000001, 1.0 + 1e-12, 3.5, -3.5, 1e-45, 1e30, -math.inf, 2.0**-126]


def test_numbers_of_several_ranks_with_many_ties(run_ranks):
    """Some ranks have no tensors, some empty ones."""

    def check(rank, group):
        random = np.random.default_rng(0)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for _ in range(20):
                sizes = [random.integers(0, 8, random.integers(0, 4)).tolist() for _ in range(3)]
                numbers = random.choice(random.choice(NUMBERS, random.integers(1, 5)), sum(map(sum, sizes)))
                numbers, k = torch.tensor(numbers, dtype=dtype), int(random.integers(0, len(numbers) + 1))
                keep = torch.zeros(len(numbers), dtype=torch.bool)
                keep[numbers.abs().sort(descending=True, stable=True).indices[:k]] = True
                flat = [size for of_rank in sizes for size in of_rank]
                begin = len([size for of_rank in sizes[:rank] for size in of_rank])
                here = slice(begin, begin + len(sizes[rank]))
                masks = global_top_k(list(numbers.split(flat))[here], k, group)
                assert [mask.tolist() for mask in masks] == [mask.tolist() for mask in list(keep.split(flat))[here]]

    run_ranks(check, 3)
