"""What holds of every host beside fully_shard: at home it is the host's, and moves change nothing or are refused."""

import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import zeroresize as zr
from helpers.dtensor_comparisons import assert_same
from helpers.dtensor_models import ATTENTION, adamw, batch, split, whole_model


def train_beside_host(host, model, loss_of, moves=None, **options):
    """The balancer, in mode off, of a model that has trained for five steps as its host.

    Bit for bit; where it is given ``moves``, shares by the step, only until then, and then but for rounding.

    Args:
        loss_of: is called with a model and the number of a step.
    """
    moves, tolerance = moves or {}, 0.0
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (host, model)]
    balancer = zr.Balancer(model, optimizers[1], config=zr.BalanceConfig(mode="off"), **options)
    for step in range(5):
        losses = []
        for each, optimizer in zip((host, model), optimizers, strict=True):
            loss = loss_of(each, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        balancer.step()
        assert losses[0] == pytest.approx(losses[1], rel=tolerance)
        if step in moves:
            balancer.move(moves[step])
            tolerance = 1e-5 if next(host.parameters()).dtype == torch.float32 else 1e-10
    assert_same(list(model.parameters()), list(host.parameters()), "weights after training", tolerance)
    return balancer


def assert_refused_at_once(balancer, error, why):
    """No unit moves, and the reason comes before a wait for other ranks could end."""
    began = time.perf_counter()
    with pytest.raises(error, match=why):
        balancer.move((3, 1))
    assert time.perf_counter() - began < 5


# ---- a decoder on replicas that share its weights --------------------------------------------------------------------

NUM_MICRO_BATCHES = 2


def plain_decoder(grid, **options):
    """The decoder of :mod:`helpers.dtensor_models`, on plain layers."""
    model, group = whole_model(), grid["tp"].get_group()
    for block in model.blocks:
        for part, names, kind in (
            (block.attention, "qkv", zr.ColumnParallelLinear),
            (block.mlp, ("gate", "up"), zr.ColumnParallelLinear),
            (block.attention, ("out",), zr.RowParallelLinear),
            (block.mlp, ("down",), zr.RowParallelLinear),
        ):
            for name in names:
                setattr(part, name, kind.from_linear(getattr(part, name), process_group=group))
    return zr.convert(model, process_group=group, segments=ATTENTION, **options)


def dtensor_decoder(grid, **options):
    """The same, split by torch's styles."""
    return zr.convert(split(whole_model(), grid["tp"]), segments=ATTENTION, **options)


def sharded(model, grid, **options):
    """``model``, each block of which replicas gather by itself."""
    for block in model.blocks:
        fully_shard(block, mesh=grid["dp"], **options)
    return fully_shard(model, mesh=grid["dp"], **options)


def grid_of(*sizes):
    return init_device_mesh("cpu", sizes or (2, 2), mesh_dim_names=("dp", "tp"))


class Training:
    """Steps of several micro-batches, with clipping and a schedule, of the batches of some replicas."""

    def __init__(self, model, optimizer, replicas, clip=zr.clip_grad_norm_, *, scales=True):
        self.model, self.optimizer, self.replicas, self.clip = model, optimizer, replicas, clip
        self.scaler = zr.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=scales)
        self.factor = 1 / (NUM_MICRO_BATCHES * len(replicas))  # fully_shard takes the mean of replicas
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        self.num_steps = 0

    def step(self):
        """Losses of the replicas, and the norm of all gradients."""
        losses = []
        for replica in self.replicas:
            for number in range(NUM_MICRO_BATCHES):
                if isinstance(self.model, FSDPModule):
                    self.model.set_requires_gradient_sync(number + 1 == NUM_MICRO_BATCHES)
                seed = 100 * self.num_steps + 10 * replica + number
                loss = nn.functional.cross_entropy(self.model(batch(seed)).flatten(0, 1), batch(seed + 5).flatten())
                self.scaler.scale(loss * self.factor).backward()
                losses.append(loss.item())
        self.scaler.unscale_(self.optimizer)
        norm = self.clip(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.num_steps += 1
        return losses, float(norm)


def undivided(num_steps, num_replicas=2):
    """Losses of each replica and norms, step by step, and the weights of one process that trains on all batches."""
    model = whole_model()
    training = Training(model, adamw(model), range(num_replicas), nn.utils.clip_grad_norm_, scales=False)
    steps = [training.step() for _ in range(num_steps)]
    return steps, model.state_dict()
