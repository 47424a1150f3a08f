"""Decoders that transformers has split by its own plan, in compiled graphs."""

import pytest
import torch
from helpers.compiled import compiled
from helpers.transformers_models import split_by_plan, train, whole_decoder
from torch.nn.utils import clip_grad_norm_

import zeroresize as zr


@pytest.mark.slow
def test_a_decoder_whose_units_move_trains_in_a_graph_as_whole(run_ranks, tmp_path):
    whole = whole_decoder("llama")
    whole.model.layers, whole.config.num_hidden_layers = whole.model.layers[:1], 1  # compiled in half the time
    whole.save_pretrained(tmp_path / "whole")
    expected = train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), 4, clip_grad_norm_)

    def check(rank, group):
        torch._dynamo.reset()
        model = split_by_plan(tmp_path / "whole", rank)
        zr.convert(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="exact"))
        call, counter = compiled(model)
        shares = {0: (3, 1), 2: (1, 1)}

        def after(step):
            balancer.step()
            if step in shares:
                balancer.move(shares[step])

        call.parameters = model.parameters
        values = train(call, optimizer, 4, zr.clip_grad_norm_, after=after)
        assert values == pytest.approx(expected, rel=1e-8)
        balancer.close()
        return counter.frame_count

    assert max(run_ranks(check, 2, timeout_s=110)) <= 4
