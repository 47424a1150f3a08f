"""What a layer's weight may be: a parameter of its own, beside other parallelism too, or an error that says so."""

import logging

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from helpers.processes import caught_log_lines
from helpers.virtual_training import FEATURES, Pair
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune, weight_norm

import zeroresize as zr
from zeroresize.conversion import balanced_layers

MAKERS = (
    (weight_norm,),
    (parametrizations.orthogonal,),
    (lambda layer: prune.random_unstructured(layer, "weight", amount=0.5),),
)


@on_ranks(2, MAKERS)
def test_a_layer_whose_weight_is_made_anew_is_left_alone_by_convert_and_later_refused(rank, group, put_on):
    model, config = Pair(group), zr.BalanceConfig(mode="zero-pri")
    put_on(model.down)
    with caught_log_lines() as lines:
        zr.convert(model, process_group=group)
    assert list(balanced_layers(model)) == ["up"]
    (line,) = [line for line in lines if "down" in line]
    assert line.startswith("convert: layer down is left alone: its weight is no parameter: something makes it anew")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    balancer = zr.Balancer(model, optimizer, process_group=group, config=config)
    balancer.pin(1, 0.5)
    for _ in range(2):
        model(torch.randn(3, FEATURES)).square().sum().backward()
        optimizer.step()
        balancer.step()
    converted = zr.convert(Pair(group), process_group=group)
    put_on(converted.down)
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.01)
    with pytest.raises(ValueError, match=r"layer down .* makes it anew.* Allowed are parameters"):
        zr.Balancer(converted, optimizer, process_group=group, config=zr.BalanceConfig(mode="off"))


# ---- FSDP, each tensor-parallel rank with a replica ------------------------------------------------------------------


def shard_by_fsdp1(model, mesh, use_orig_params, strategy):
    group, device = mesh.get_group(), torch.device("cpu")
    return FullyShardedDataParallel(
        model, group, ShardingStrategy[strategy], use_orig_params=use_orig_params, device_id=device
    )


def shard_by_fsdp2(model, mesh):
    return fully_shard(model, mesh=mesh)


WRAPS = {
    "fsdp2": shard_by_fsdp2,
    "flat": lambda model, mesh: shard_by_fsdp1(model, mesh, False, "FULL_SHARD"),
    "original": lambda model, mesh: shard_by_fsdp1(model, mesh, True, "FULL_SHARD"),
    "gradients": lambda model, mesh: shard_by_fsdp1(model, mesh, True, "SHARD_GRAD_OP"),
    "flat, whole": lambda model, mesh: shard_by_fsdp1(model, mesh, False, "NO_SHARD"),
    "original, whole": lambda model, mesh: shard_by_fsdp1(model, mesh, True, "NO_SHARD"),
}


class Replicated:
    """A converted pair on two ranks, twice, wrapped in data parallelism."""

    def __init__(self, wrap, **config):
        logging.disable(logging.WARNING)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "tensor"))
        group, replicas = mesh["tensor"].get_group(), mesh["replicas"]
        self.config = zr.BalanceConfig(update_every=2, **config)
        self.model = wrap(zr.convert(Pair(group), process_group=group), replicas)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.balancer = zr.Balancer(self.model, self.optimizer, process_group=group, config=self.config)
        self.seed = 100 * replicas.get_local_rank()

    def train(self, num_steps=6):
        losses = []
        for step in range(num_steps):
            x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(self.seed + step))
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.balancer.step()
            if step == 2:
                self.balancer.epoch_end()
            losses.append(loss.item())
        self.balancer.state_dict()
        return losses


def replicate(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group())


FORCED = {"ratio": 0.5, "ranks": [1]}


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "config"),
    [
        ("fsdp2", {"mode": "off"}),
        ("fsdp2", {"mode": "zero-rd", **FORCED}),
        ("fsdp2", {"mode": "zero-rd", "paper": {"imputation": "same"}, **FORCED}),
        *(
            ("original, whole", {"mode": "zero-pri", "priority": priority, **FORCED})
            for priority in ("activation", "variation", "path_length")
        ),
    ],
    ids=str,
)
@on_ranks(4)
def test_what_is_allowed_beside_fsdp_trains_as_beside_ddp(rank, group, *, wrap, config):
    for expected, losses in gathered(group, [Replicated(one, **config).train() for one in (replicate, WRAPS[wrap])]):
        assert losses == pytest.approx(expected, rel=1e-5)


#: How a model is wrapped, the mode, and what the error says.
REFUSED = (
    *(("fsdp2", {"mode": mode}, "has a DTensor") for mode in ("zero-pri", "zero-pridiff", "mig", "semi")),
    ("fsdp2", {"mode": "zero-rd", "pruned_update": "freeze"}, "has a DTensor"),
    ("flat", {"mode": "off"}, "its weight is no parameter"),
    ("flat, whole", {"mode": "off"}, "its weight is no parameter"),
    ("original", {"mode": "off"}, "flattens and shards its weight"),
    ("gradients", {"mode": "off"}, "flattens and shards its weight"),
    *(("original, whole", {"mode": mode}, "replaces its weight") for mode in ("mig", "semi")),
)


@on_ranks(4, REFUSED)
def test_what_does_not_work_beside_fsdp_is_refused_by_the_balancer(rank, group, wrap, config, problem):
    with pytest.raises(ValueError, match=rf"(?i)layer .*up .*{problem}.*allowed are"):
        Replicated(WRAPS[wrap], **config)


@on_ranks(4, timeout_s=20)
def test_no_unit_moves_where_fully_shard_comes_after_the_balancer(rank, _):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "tensor"))
    group, replicas = mesh["tensor"].get_group(), mesh["replicas"]
    config = zr.BalanceConfig(mode="off")
    model = zr.convert(Pair(group), process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    alike = replicas.get_group()
    balancer = zr.Balancer(model, optimizer, process_group=group, config=config, data_parallel_group=alike)
    fully_shard(model, mesh=replicas)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.raises(RuntimeError, match=r"is a DTensor, .* fully_shard"):
        balancer.move([3, 1])
    model(torch.ones(2, FEATURES)).square().mean().backward()
    optimizer.step()
    balancer.step()
    squares = {name: one.grad.full_tensor().square().sum() for name, one in model.named_parameters()}
    replicated = squares.pop("down.bias")
    shards = torch.stack(list(squares.values())).sum()
    torch.distributed.all_reduce(shards, group=group)
    norm = zr.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(norm, (shards + replicated).sqrt())
