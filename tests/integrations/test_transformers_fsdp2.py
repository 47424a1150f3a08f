"""The two-dimensional meshes of transformers 5: its tensor-parallel plan with fully_shard of its own around it."""

import time

import pytest
import torch
import transformers
from helpers.transformers_models import as_rank, batch, whole_decoder

import zeroresize as zr
from zeroresize.convert import balanced_layers
from zeroresize.layers.local_parts import local_of

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]


def split_and_sharded(folder, rank):
    """The model in ``folder`` on a mesh of 2 x 2: replicas that share the weights, and the plan's ranks."""
    from transformers.distributed import DistributedConfig

    with as_rank(rank, 4):
        config = DistributedConfig(tp_plan="auto", tp_size=2, fsdp_size=2)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=config, dtype=torch.float64
        )
    return model.train()


def test_what_does_not_move_is_that_of_the_host_and_moves_are_refused_at_once(run_ranks, tmp_path):
    whole_decoder("llama").save_pretrained(tmp_path / "whole")

    def check(rank, group):
        host, model = (split_and_sharded(tmp_path / "whole", rank) for _ in range(2))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (host, model)]
        zr.convert(model)
        assert len(balanced_layers(model)) == 14, "seven layers in each of two blocks"
        balancer = zr.Balancer(model, optimizers[1], zr.BalanceConfig(mode="off"))
        for step in range(3):
            losses = []
            for each, optimizer in zip((host, model), optimizers, strict=True):
                loss = each(**batch(step)).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            balancer.step()
            assert losses[0] == losses[1]
        for ours, theirs in zip(model.parameters(), host.parameters(), strict=True):
            assert torch.equal(local_of(ours), local_of(theirs))
        began = time.perf_counter()
        with pytest.raises(ValueError, match="no unit can change hands"):
            balancer.move((3, 1))
        assert time.perf_counter() - began < 5
        balancer.close()

    run_ranks(check, 4)
