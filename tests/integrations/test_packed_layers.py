"""Packed layers that were split across their parts are refused, whatever words cut their outputs, and no others."""

import logging
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.on_ranks import on_ranks
from helpers.processes import caught_log_lines
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroresize as zr
from zeroresize.checks.recording import Recorder
from zeroresize.resharding.ranks import Ranks

pytestmark = pytest.mark.same_ranks

rearrange = pytest.importorskip("einops").rearrange

WIDTH, HEADS, HEAD = 8, 4, 2


def heads(x, *before):
    return x.view(*before, -1, HEAD).transpose(1, 2)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2).flatten(2)


class Packed(nn.Module):
    """Its forward is ``mix(self, what the packed layer returns)``."""

    num_outputs = 3 * WIDTH

    def __init__(self, mix):
        super().__init__()
        self.mix = mix
        self.up, self.down = nn.Linear(WIDTH, self.num_outputs), nn.Linear(WIDTH, WIDTH)
        self.set_heads(range(HEADS))

    def set_heads(self, units):
        self.num_heads = len(units)

    @property
    def dim(self):
        return self.num_heads * HEAD

    def forward(self, x):
        return self.down(self.mix(self, x, self.up(x)))


def by_split(self, x, y):
    B, T, _ = x.size()
    q, k, v = y.split(self.dim, dim=2)
    q, k, v = heads(q, B, T), heads(k, B, T), heads(v, B, T)
    weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))  # torch.fx stops here
    return (weights.softmax(-1) @ v).transpose(1, 2).flatten(2)


def by_unbind(self, x, y):
    q, k, v = y.unflatten(-1, (3, -1, HEAD)).unbind(-3)
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def attend_heads(x, parts):
    return attend(*(heads(one, x.shape[0], x.shape[1]) for one in parts))


#: Ways to cut q, k and v.
CUTS = {
    "chunk": lambda self, x, y: attend_heads(x, y.chunk(3, dim=-1)),
    "split": by_split,
    "permute": lambda self, x, y: attend(*y.reshape(*x.shape[:2], 3, self.num_heads, HEAD).permute(2, 0, 3, 1, 4)),
    "einops": lambda self, x, y: attend(*rearrange(y, "b t (three h d) -> three b h t d", three=3, d=HEAD)),
    "untraced loop": lambda self, x, y: attend(*(p.transpose(1, 2) for p in y.unflatten(-1, (3, -1, HEAD)).unbind(2))),
    "axis of heads": lambda self, x, y: attend(
        *y.view(*x.shape[:2], -1, HEAD).transpose(1, 2).split([self.num_heads] * 3, dim=1)
    ),
}


class Gated(Packed):
    num_outputs = 2 * WIDTH


GATES = {
    "glu": lambda self, x, y: F.glu(y, dim=-1),
    "gate": lambda self, x, y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1],
}


class Plain(Packed):
    num_outputs = WIDTH


def of_each_head(self, x, y):
    """[heads, 3, head size], as GPT-NeoX has it."""
    q, k, v = y.view(x.shape[0], x.shape[1], self.num_heads, 3 * HEAD).chunk(3, dim=-1)
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def of_each_group(self, x, y):
    y = y.unflatten(-1, (-1, 3, HEAD))
    q, k, v = y[..., 0, :], y[..., 1, :], y[..., 2, :]
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def halves_of_heads(self, x, y):
    y = y.view(x.shape[0], x.shape[1], self.num_heads, HEAD)
    half = torch.cat((-y[..., HEAD // 2 :], y[..., : HEAD // 2]), dim=-1)
    return (y * 0.5 + half * 0.7).flatten(2)


#: What is of every head, or joins again: kinds, and what they do.
RIGHT = {
    "of each head": (Packed, of_each_head),
    "of each group": (Packed, of_each_group),
    "one head after another": (
        Plain,
        lambda self, x, y: torch.cat([F.softmax(one, dim=-1) for one in y.chunk(self.num_heads, dim=-1)], dim=-1),
    ),
    "halves of heads": (Plain, halves_of_heads),
}


def split(model, by, group, parts=None):
    """The ways of hosts and of this package; ``parts`` only where a way has them."""
    mesh = init_device_mesh("cpu", (2,))
    options = {} if parts is None else {"parts": parts}
    if by == "from_linear":
        model.up = zr.ColumnParallelLinear.from_linear(model.up, process_group=group, **options)
        model.down = zr.RowParallelLinear.from_linear(model.down, process_group=group)
    elif by == "styles":
        parallelize_module(model, mesh, {"up": zr.ColwiseParallel(**options), "down": zr.RowwiseParallel()})
    else:
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.set_heads(range(HEADS // 2))
    return model


def cuts_seen_in(model, group):
    """What check_parallel() sees of cuts while a forward runs."""
    with Recorder(model, Ranks(group, torch.device("cpu"))) as recorder:
        model(torch.randn(2, 3, WIDTH))
    return {layer: next(iter(blocks.values())) for layer, blocks in recorder.blocks.items()}


@on_ranks(2)
def test_layers_that_were_cut_across_their_parts_are_refused_in_every_word(rank, group):
    cases = [(Packed, name, mix) for name, mix in CUTS.items()] + [(Gated, name, mix) for name, mix in GATES.items()]
    for kind, name, mix in cases:
        model = kind(mix)
        model.act = nn.GLU()
        split(model, "from_linear", group)
        assert list(cuts_seen_in(model, group)) == ["up"], name
        with pytest.raises(ValueError, match=r"layer up was split .* as one part, and .* parts="):
            zr.convert(model, process_group=group)
    for by in ("styles", "torch"):
        with pytest.raises(ValueError, match="layer up was split over the ranks as one part"):
            zr.Balancer(split(Packed(CUTS["chunk"]), by, group), None, zr.BalanceConfig(mode="off"))


@on_ranks(2)
def test_what_is_right_already_is_not_refused(rank, group):
    for name, (kind, mix) in RIGHT.items():
        torch.manual_seed(0)
        whole = kind(mix).double()
        x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
        expected = whole(x)
        for by in ("from_linear", "styles", "torch") if mix is of_each_head else ("from_linear",):
            torch.manual_seed(0)
            model = split(kind(mix).double(), by, group)
            with caught_log_lines(logging.WARNING) as lines:
                zr.convert(model, process_group=group)
            assert not any("cuts" in line for line in lines), name
            torch.testing.assert_close(model(x), expected)
        if "head " not in name and "side" not in name:  # a running forward shows no cut either
            assert not cuts_seen_in(split(kind(mix), "from_linear", group), group), name


@on_ranks(2)
def test_parts_make_them_right_and_other_parts_are_refused(rank, group):
    cases = ((Packed, CUTS["chunk"], 3), (Packed, CUTS["permute"], (WIDTH,) * 3), (Gated, GATES["gate"], 2))
    for kind, mix, parts in cases:
        torch.manual_seed(0)
        whole = kind(mix).double()
        x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
        expected = whole(x)
        for by in ("from_linear", "styles"):
            torch.manual_seed(0)
            model = split(kind(mix).double(), by, group, parts)
            torch.testing.assert_close(zr.convert(model, process_group=group)(x), expected)
    refused = [(CUTS["chunk"], 2, "as parts=.*, and chunk"), (by_unbind, (16, 4, 4), "and unbind")]
    refused += [(mix, 3, "its layout is interleaved") for mix in (of_each_head, of_each_group)]
    for mix, parts, message in refused:
        with pytest.raises(ValueError, match=message):
            zr.convert(split(Packed(mix), "from_linear", group, parts), process_group=group)
    segment = zr.Segment(["up"], "down", HEAD, parts=3, on_change=len)
    with pytest.raises(ValueError, match=r"up was split over the ranks as one part, and the segment says parts=3"):
        model = split(Packed(CUTS["untraced loop"]), "from_linear", group)
        zr.convert(model, process_group=group, segments=[segment])


def drawn_on_ranks(group, **options):
    model = Packed(CUTS["chunk"])
    model.up = zr.ColumnParallelLinear(WIDTH, 3 * WIDTH, process_group=group, **options)
    model.down = zr.RowParallelLinear(WIDTH, WIDTH, process_group=group)
    return model


@on_ranks(2)
def test_where_it_is_not_known_who_has_split_a_layer_a_warning_asks(rank, group):
    for options, is_told in (({}, True), ({"parts": 3}, False)):
        with caught_log_lines(logging.WARNING) as lines:
            zr.convert(drawn_on_ranks(group, **options), process_group=group)
        assert any("layer up: chunk() cuts its output" in line for line in lines) == is_told
    segment = zr.Segment(["up"], "down", HEAD, parts=3, on_change=len)
    with caught_log_lines(logging.WARNING) as lines:
        zr.convert(drawn_on_ranks(group), process_group=group, segments=[segment])
    assert not lines
