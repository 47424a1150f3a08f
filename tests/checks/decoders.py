"""A small decoder with what is often divided wrongly, over ranks as plain layers or as DTensors."""

import torch
from helpers.dtensor_models import Replicated, mesh_of
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import zeroresize as zr

WIDTH, HIDDEN, HEAD, TOKENS, WORDS = 16, 48, 4, 6, 20
COLUMNS, ROWS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), ("attention.out", "mlp.down")


class Attention(nn.Module):
    def __init__(self, kv_heads, has_norms, is_causal):
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, kv_heads * HEAD) for _ in range(2))
        self.q_norm, self.k_norm = (nn.RMSNorm(HEAD) if has_norms else nn.Identity() for _ in range(2))
        self.is_causal = is_causal

    def heads(self, x):
        return tuple(layer(x).unflatten(-1, (-1, HEAD)) for layer in (self.q, self.k, self.v))

    def forward(self, x):
        q, k, v = self.heads(x)
        q, k, v = (one.transpose(1, 2) for one in (self.q_norm(q), self.k_norm(k), v))
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class PackedFeedForward(nn.Module):
    """Gate and up in one weight."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, kv_heads, has_norms, is_causal, dropout, is_packed, has_scale):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(kv_heads, has_norms, is_causal)
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), PackedFeedForward() if is_packed else FeedForward()
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if has_scale else 1.0

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.scale * self.dropout(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    def __init__(
        self, kv_heads=4, has_norms=False, is_causal=True, dropout=0.0, is_packed=False, is_tied=False, has_scale=False
    ):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(
            *(Block(kv_heads, has_norms, is_causal, dropout, is_packed, has_scale) for _ in range(2))
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(self.norm(self.blocks(self.embed(words))))


def whole(**options):
    """The same on every rank and at every call; no parameter is a constant, and attention is not uniform."""
    torch.manual_seed(0)
    model = Decoder(**options).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.4)
    return model


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (3, TOKENS), generator=generator), torch.randint(
        WORDS, (3, TOKENS), generator=generator
    )


def loss(model, words_and_targets, **options):
    words, targets = words_and_targets
    return functional.cross_entropy(model(words).flatten(0, 1), targets.flatten(), **options)


def masked_loss(model, words_and_targets):
    words, targets = words_and_targets
    return loss(model, (words, targets.masked_fill(words % 3 == 0, -100)))


def split(model, group):
    """By this package's layers, in place."""
    for name, module in list(model.named_modules()):
        kind = zr.ColumnParallelLinear if name.endswith(COLUMNS) else zr.RowParallelLinear
        if name.endswith((*COLUMNS, *ROWS)):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, kind.from_linear(module, process_group=group))
    return model


def split_by_styles(model, *, is_sequence=False, head=None, row=RowwiseParallel, column=ColwiseParallel):
    """By torch's styles as torchtitan does: all parameters are DTensors but ``scale`` and norms of heads."""
    mesh = mesh_of()
    whole_x = Shard(1) if is_sequence else Replicate()
    norm = SequenceParallel(use_local_output=True) if is_sequence else Replicated()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=whole_x),
        "norm": norm,
        "head": column(input_layouts=whole_x, **(head or {"output_layouts": Replicate()})),
    }
    for number in range(len(model.blocks)):
        for name, _ in model.blocks[number].named_modules():
            if name.endswith((*COLUMNS, "gate_up")):
                plan[f"blocks.{number}.{name}"] = column()
            elif name.endswith(ROWS):
                plan[f"blocks.{number}.{name}"] = row(output_layouts=whole_x)
            elif name in ("norm1", "norm2"):
                plan[f"blocks.{number}.{name}"] = norm
            elif name in ("attention", "mlp") and is_sequence:
                gathers = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
                plan[f"blocks.{number}.{name}"] = PrepareModuleInput(**gathers)
    return parallelize_module(model, mesh, plan)
