"""The two-dimensional meshes of transformers 5: its tensor-parallel plan with fully_shard of its own around it."""

import pytest
import torch
import transformers
from helpers.fsdp2 import train_beside_host
from helpers.transformers_models import as_rank, batch, whole_decoder

import zeroresize as zr
from zeroresize.conversion import balanced_layers

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


def test_at_home_it_is_the_host_and_moves_change_nothing(run_ranks, tmp_path):
    whole_decoder("llama").save_pretrained(tmp_path / "whole")

    def check(rank, group):
        host, model = (split_and_sharded(tmp_path / "whole", rank) for _ in range(2))
        zr.convert(model)
        assert len(balanced_layers(model)) == 14, "seven layers in each of two blocks"
        moves = {1: (3, 1), 3: (1, 1)}
        balancer = train_beside_host(host, model, lambda each, step: each(**batch(step)).loss, moves)
        balancer.close()

    run_ranks(check, 4)
