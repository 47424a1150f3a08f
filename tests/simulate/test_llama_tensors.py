"""Tensors of LLaMA-like models: as many parameters as published, and divided as tensor parallelism divides them."""

import pytest

from scripts.simulated.llama_tensors import LLAMA_7B, LLAMA_32B, LLAMA_70B, llama_tensors
from zeroresize.plan.strategy import Strategy


@pytest.mark.parametrize(("shape", "num_parameters"), [(LLAMA_7B, 6_738_415_616), (LLAMA_70B, 68_976_648_192)])
def test_parameters_are_as_many_as_of_the_published_models(shape, num_parameters):
    assert sum(one.num_bytes for one in llama_tensors(shape, itemsize=4)) == 4 * num_parameters


def test_sixteen_ranks_divide_all_but_the_norms():
    tensors = llama_tensors(LLAMA_32B)
    layout = Strategy(1, 16, 2).layout(tensors, 32, LLAMA_32B.num_layers)
    norms = sum(one.num_bytes for one in tensors if one.division is None)
    assert norms == 121 * 6656 * 2
    total = sum(one.num_bytes for one in tensors)
    assert layout.rank_bytes(tensors).sum() == total + 15 * norms
