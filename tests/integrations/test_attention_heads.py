"""Heads that the ranks do not divide are an error that names heads and ranks, before the first forward, or right."""

import pytest
import torch
import transformers
from helpers import dtensor_models, transformers_models
from helpers.on_ranks import on_ranks
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroresize as zr

pytestmark = pytest.mark.transformers

CASES = [
    {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
    {"num_key_value_heads": 1},
    {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24},
]


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zr.Balancer(model, optimizer)
    return transformers_models.train(model, optimizer, 2, zr.clip_grad_norm_)


def losses_or_refusal(make):
    try:
        return train(make())
    except ValueError as error:
        assert "heads" in str(error) and "2 ranks" in str(error)
        return None


@pytest.mark.parametrize("case", range(len(CASES)))
def test_plans_of_transformers(run_ranks, tmp_path, case):
    _, settings = transformers_models.DECODERS["llama"]
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **CASES[case]})).double()
    whole.save_pretrained(tmp_path)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    expected = transformers_models.train(whole, optimizer, 2, zr.clip_grad_norm_)

    def losses(rank, group):
        return losses_or_refusal(lambda: transformers_models.split_by_plan(tmp_path, rank))

    for values in run_ranks(losses, 2):
        assert values is None or values == pytest.approx(expected, rel=1e-9)


@on_ranks(2)
def test_plain_styles(rank, group):
    for styles in ((ColwiseParallel, RowwiseParallel), (zr.ColwiseParallel, zr.RowwiseParallel)):
        attention = dtensor_models.Attention(bias=True)
        attention.head_dim = dtensor_models.WIDTH  # one head
        plan = {name: styles[name == "out"]() for name in ("q", "k", "v", "out")}
        parallelize_module(attention, dtensor_models.mesh_of(), plan)
        with pytest.raises(ValueError, match=r"q has 1 heads of 16 rows and is split over 2 ranks"):
            zr.convert(attention)
