"""A small decoder, split into DTensors as torchtitan does, and its training with torch's own clipping."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import zeroresize as zr
from helpers import compiled
from zeroresize.layers.local_parts import local_of

WIDTH, HIDDEN, HEADS, TOKENS, WORDS = 16, 48, 4, 6, 20


class Attention(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.head_dim = WIDTH // HEADS

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=bias), nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(bias)
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), FeedForward(bias)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(bias), Block(bias))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        return self.head(self.norm(self.blocks(self.embed(words))))


def whole_model(bias=True):
    torch.manual_seed(0)
    return Model(bias).double()


def mesh_of(num_ranks=2, device_type="cpu"):
    return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=("tp",))["tp"]


def split(model, mesh, *, sequence=False, styles=(ColwiseParallel, RowwiseParallel), head=None):
    """As torchtitan divides a decoder: all parameters are DTensors; ``head`` says what the head returns."""
    column, row = styles
    whole = Shard(1) if sequence else Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=whole),
            "norm": SequenceParallel(use_local_output=True) if sequence else Replicated(),
            "head": ColwiseParallel(input_layouts=whole, **(head or {"output_layouts": Replicate()})),
        },
    )
    for block in model.blocks:
        plan = {
            "attention.q": column(),
            "attention.k": column(),
            "attention.v": column(),
            "attention.out": row(output_layouts=whole),
            "mlp.gate": column(),
            "mlp.up": column(),
            "mlp.down": row(output_layouts=whole),
            "norm1": SequenceParallel(use_local_output=True) if sequence else Replicated(),
            "norm2": SequenceParallel(use_local_output=True) if sequence else Replicated(),
        }
        if sequence:
            gathers = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            plan |= {"attention": PrepareModuleInput(**gathers), "mlp": PrepareModuleInput(**gathers)}
        parallelize_module(block, mesh, plan)
    return model


class Replicated(SequenceParallel):
    """A norm on every rank, with DTensors as parameters."""

    def __init__(self):
        super().__init__(use_local_output=True)
        self.sequence_sharding = (Replicate(),)


def batch(seed):
    return torch.randint(WORDS, (3, TOKENS), generator=torch.Generator().manual_seed(seed))


def train(model, optimizer, num_steps, after=lambda step: None, max_norm=0.5):
    """Losses and norms of some steps with torch's own clipping."""
    values = []
    device = next(model.parameters()).device
    for step in range(num_steps):
        logits = model(batch(step).to(device))
        loss = functional.cross_entropy(logits.flatten(0, 1), batch(step + 100).flatten().to(device))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        after(step)
        values += [loss.item(), norm.item()]
    return values


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def train_while_units_move(model, shares, num_steps, call=None, **options):
    """What :func:`train` returns, and the shape of this rank's part of ``down`` of the first block after each step.

    Args:
        shares: [R] by the step after which units move to them.
        call: what is trained as the model, such as a graph of it.
        options: of the optimizer.
    """
    optimizer = adamw(model, **options)
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="exact"))
    shapes = []

    def after(step):
        balancer.step()
        if step in shares:
            balancer.move(shares[step])
        shapes.append(tuple(local_of(model.blocks[0].mlp.down.weight).shape))

    values = train(model if call is None else call, optimizer, num_steps, after)
    balancer.close()
    return values, shapes


def feed_forward(mesh, device="cpu", whole=None):
    """``whole``: layout of what is read and returned; by default every rank has all of it."""
    whole = whole or Replicate()
    torch.manual_seed(0)
    model = FeedForward(bias=True).double().to(device)
    column, row = ColwiseParallel(input_layouts=whole), RowwiseParallel(output_layouts=whole)
    parallelize_module(model, mesh, {"gate": column, "up": column, "down": row})
    zr.convert(model)
    return model


def train_feed_forward(model, call, shares):
    """Loss, norm and number of this rank's neurons of each step; after each units move to its shares."""
    x = compiled.batch(width=WIDTH).to(next(model.parameters()).device)
    optimizer = adamw(model)
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="exact"))
    values = []
    for share in shares:
        loss = call(x).square().mean()
        loss.backward()
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
        balancer.move(share)
        values += [loss.item(), norm.item(), local_of(model.up.weight).shape[0]]
    balancer.close()
    return values


ATTENTION = [
    zr.Segment(
        [f"blocks.{number}.attention.{name}" for name in "qkv"],
        f"blocks.{number}.attention.out",
        unit_size=WIDTH // HEADS,
        kind="heads",
        min_units=0,
    )
    for number in (0, 1)
]
