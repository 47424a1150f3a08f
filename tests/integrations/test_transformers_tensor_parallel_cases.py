"""The cases of transformers' own tests of tensor-parallel plans, for converted models whose units have moved."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.transformers_models import split_by_plan, train, whole_decoder
from torch.nn.utils import clip_grad_norm_

import zeroresize as zr

pytestmark = pytest.mark.slow

EXACT = zr.BalanceConfig(mode="exact")


def saved_decoder(kind, folder, *, is_tied=False):
    """A whole decoder and the folder that it was saved in."""
    whole = whole_decoder(kind)
    if is_tied:
        whole.config.tie_word_embeddings = True
        whole.tie_weights()
    whole.save_pretrained(folder)
    return whole.eval()


@pytest.mark.parametrize("mode", ["mig", "zero-rd"])
def test_columns_of_a_plans_layers_are_lent_and_dropped(run_ranks, tmp_path, mode):
    whole = saved_decoder("llama", tmp_path / "whole").train()
    expected = train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), 3, clip_grad_norm_)

    def check(rank, group):
        model = split_by_plan(tmp_path / "whole", rank).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = zr.BalanceConfig(mode=mode, ratio=0.5, ranks=[1], update_every=1)
        balancer = zr.Balancer(model, optimizer, config)
        values = train(model, optimizer, 3, zr.clip_grad_norm_, after=lambda step: balancer.step())
        plan = balancer.plan.ranks[1]
        assert (plan.lent > 0.4) if mode == "mig" else (plan.pruned > 0.4)
        assert (values == pytest.approx(expected, abs=1e-6)) == (mode == "mig")
        balancer.close()

    run_ranks(check, 2)


@pytest.mark.slow
def test_training_is_resumed_from_a_checkpoint_of_units_that_were_away(run_ranks, tmp_path):
    saved_decoder("llama", tmp_path / "whole")

    def check(rank, group):
        results = []
        for shares in ((3, 1), (1, 3)):
            model = split_by_plan(tmp_path / "whole", rank).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            balancer = zr.Balancer(model, optimizer, EXACT)
            balancer.move(shares)
            if not results:
                train(model, optimizer, 2, zr.clip_grad_norm_)
                dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path / "away")
            else:
                dcp.load(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path / "away")
            results.append(train(model, optimizer, 2, zr.clip_grad_norm_))
            balancer.close(at_home=True)
        assert results[1] == pytest.approx(results[0], abs=1e-6)

    run_ranks(check, 2)
