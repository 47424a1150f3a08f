"""The two-dimensional meshes of transformers 5: its tensor-parallel plan with fully_shard of its own around it."""

import pytest
import torch
import transformers
from helpers.fsdp2 import train_beside_host
from helpers.transformers_models import as_rank, batch, whole_decoder, with_eager_experts

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


@pytest.mark.parametrize(("kind", "num_layers"), [("llama", 7), ("mixtral", 5)])
def test_at_home_it_is_the_host_and_moves_change_nothing(run_ranks, tmp_path, monkeypatch, kind, num_layers):
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))
    whole_decoder(kind).save_pretrained(tmp_path / "whole")

    def check(rank, group):
        host, model = (with_eager_experts(split_and_sharded(tmp_path / "whole", rank)) for _ in range(2))
        zr.convert(model)
        layers = balanced_layers(model)
        assert len(layers) == 2 * num_layers and all(layer.segment is not None for layer in layers.values())
        moves = {1: (3, 1), 3: (1, 1)}
        balancer = train_beside_host(host, model, lambda each, step: each(**batch(step)).loss, moves)
        balancer.close()

    run_ranks(check, 4)
