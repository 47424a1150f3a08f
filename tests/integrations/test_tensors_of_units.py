"""Sinks, slopes and scales of single heads beside a named segment's layers: extra= names those that move along."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers.dtensor_models import mesh_of
from helpers.on_ranks import on_ranks
from helpers.segments import train_by_halves
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_

import zeroresize as zr
from zeroresize.resharding.units.moving_units import bytes_of_units

WIDTH, HEADS, HEAD = 24, 8, 5
HERE = HEADS // 2


class Attention(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.qkv = zr.ColumnParallelLinear(WIDTH, 3 * HEADS * HEAD, process_group=group)
        self.out = zr.RowParallelLinear(HEADS * HEAD, WIDTH, process_group=group)
        self.num_heads, self.head_dim = HERE, HEAD

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, HEAD)).movedim(-3, 0).transpose(-2, -3)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


OF_HEADS = (
    lambda: nn.Parameter(torch.ones(HERE)),
    lambda: nn.Parameter(torch.ones(1, HERE, 1, 1)),
    lambda: nn.Parameter(distribute_tensor(torch.ones(HEADS), mesh_of(), [Shard(0)])),
    lambda: nn.Buffer(torch.ones(HERE, 1, 1)),
    lambda: nn.Parameter(torch.ones(HERE), requires_grad=False),
    lambda: torch.ones(HERE, 1, 1),
    lambda: nn.Embedding(32, HERE),
    lambda: nn.Linear(WIDTH, HERE),
    lambda: nn.Parameter(torch.ones(HERE * HEAD)),
)
OF_ALL = (
    lambda: nn.RMSNorm(HEAD),
    lambda: nn.Parameter(torch.ones(WIDTH)),
    lambda: nn.Buffer(torch.ones(1, 1, HERE, HERE)),
    lambda: nn.Parameter(torch.ones(1)),
    lambda: nn.Buffer(torch.ones(HEADS)),  # slopes of all ranks' heads
)


def convert_holding(kept, group):
    attention = Attention(group)
    attention.kept = kept

    def follow(heads):
        attention.num_heads = len(heads)

    segment = zr.Segment(["0.qkv"], "0.out", unit_size=HEAD, parts=3, kind="heads", on_change=follow)
    zr.convert(nn.Sequential(attention), process_group=group, segments=[segment])


@on_ranks(2)
def test_a_tensor_of_single_heads_is_refused_before_shapes_fail(rank, group):
    for make in OF_HEADS:
        with pytest.raises(ValueError, match=r"0\.kept.*does not follow them: (on_change must|parameters)"):
            convert_holding(make(), group)
    for make in OF_ALL:
        convert_holding(make(), group)


class Gated(nn.Module):
    """Attention with a scale, a gate and fixed slopes of each head."""

    entering = staticmethod(lambda x: x)

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * HEAD), nn.Linear(HEADS * HEAD, WIDTH)
        self.scale = nn.Parameter(torch.rand(HEADS, 1, HEAD))
        self.gate = nn.ParameterDict({"weight": nn.Parameter(torch.randn(WIDTH, 2 * HEADS))})
        self.slopes = nn.Parameter(torch.rand(HEADS), requires_grad=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD)).movedim(-3, 0).transpose(-2, -3)
        distance = torch.arange(x.shape[1]).double()
        y = F.scaled_dot_product_attention(q, k, v, self.slopes[:, None, None] * (distance - distance[:, None]))
        gates = (self.entering(x) @ self.gate["weight"]).unflatten(-1, (-1, 2)).sigmoid().prod(dim=-1).transpose(-1, -2)
        return self.out((y * self.scale * gates[..., None]).transpose(-2, -3).flatten(-2))


class Entering(torch.autograd.Function):
    """x, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.contiguous()
        torch.distributed.all_reduce(dx)
        return dx


EXTRA = ["0.scale", ("0.gate.weight", 1)]


def whole_gated():
    torch.manual_seed(0)
    return nn.Sequential(Gated()).double()


def divided(group, rank):
    model = whole_gated()
    gated = model[0]
    gated.entering = Entering.apply
    gated.qkv = zr.ColumnParallelLinear.from_linear(gated.qkv, process_group=group, parts=3)
    gated.out = zr.RowParallelLinear.from_linear(gated.out, process_group=group)
    for owner, name, dim in ((gated, "scale", 0), (gated.gate, "weight", 1), (gated, "slopes", 0)):
        whole = getattr(owner, name)
        part = nn.Parameter(whole.detach().chunk(2, dim)[rank].clone(), whole.requires_grad)
        setattr(owner, name, part)
    return model


def segment_of(model, **options):
    given = {"extra": [*EXTRA, model[0].slopes], "on_change": lambda heads: None} | options
    return zr.Segment(["0.qkv"], "0.out", unit_size=HEAD, kind="heads", **given)


def states_of(model, optimizer):
    states = (optimizer.state.get(parameter, {}) for parameter in model.parameters())
    kept = [value for state in states for _, value in sorted(state.items())]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *kept)]


@on_ranks(2)
def test_what_extra_names_moves_is_clipped_and_saved_as_in_the_undivided_model(rank, group, *, tmp_path):
    model, whole = divided(group, rank), whole_gated()
    zr.convert(model, process_group=group, segments=[segment_of(model)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="exact"))
    moves = {0: (3, 1), 2: (1, 3), 3: (1, 1), 4: (3, 1)}

    def after(step):
        balancer.step()
        if step in moves:
            balancer.move(moves[step])

    computed = train_by_halves(WIDTH, model, optimizer, 6, zr.clip_grad_norm_, after)
    whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    assert computed == pytest.approx(train_by_halves(WIDTH, whole, whole_optimizer, 6, clip_grad_norm_), rel=1e-10)
    here = HEADS * (3, 1)[rank] // 4
    assert model[0].scale.shape == (here, 1, HEAD) and model[0].gate["weight"].shape == (WIDTH, 2 * here)
    dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path)
    read = {key: torch.empty_like(value) for key, value in whole.state_dict().items()}
    dcp.load(read, checkpoint_id=tmp_path)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(read[key], value, rtol=0, atol=1e-10)

    balancer.move((1, 1))
    before = states_of(model, optimizer)
    for shares in ((3, 1), (1, 3), (1, 1)):
        balancer.move(shares)
    assert all(map(torch.equal, states_of(model, optimizer), before))
    of_unit = 3 * HEAD * (WIDTH + 1) + HEAD * WIDTH + HEAD + 2 * WIDTH
    assert bytes_of_units([model[0].out.segment], optimizer) == HERE * 8 * (3 * of_unit + 1)
    expected = train_by_halves(WIDTH, whole, whole_optimizer, 1, clip_grad_norm_)
    for other in (copy.deepcopy(model), divided(group, rank)):
        if other[0].out.extra == ():
            zr.convert(other, process_group=group, segments=[segment_of(other)])
        others = torch.optim.AdamW(other.parameters(), lr=1e-2)
        dcp.load(zr.sharded_state_dict(other, others), storage_reader=zr.CheckpointReader(tmp_path))
        assert all(map(torch.equal, states_of(other, others), before))
        assert train_by_halves(WIDTH, other, others, 1, zr.clip_grad_norm_) == pytest.approx(expected, rel=1e-10)
    assert all(check.problem is None for check in zr.check_segments(model, torch.randn(2, 3, WIDTH)))


@on_ranks(2)
def test_extra_that_does_not_fit_is_refused(rank, group):
    refused = {
        "the model has no parameter '0.sinks'": ["0.sinks"],
        "no parameter '0.table'; buffers of units are for on_change to set": ["0.table"],
        "the model has no parameter a parameter of shape": [nn.Parameter(torch.ones(HERE))],
        r"0\.scale has the shape \(4, 1, 5\) on this rank, and dimension 1 must hold equally many": [("0.scale", 1)],
        "dimension 3 must hold": [("0.scale", 3)],
        "dimension -1 must hold": [("0.scale", -1)],
        r"0\.scale is in it twice": ["0.scale", "0.scale"],
        r"0\.out\.bias is of a parallel layer": ["0.out.bias"],
        r"0\.other is shared with another module": ["0.other"],
        r"0\.scale is in another segment already, that of 0\.out": None,
        r"0\.scale, of shape \[4, 1, 5\].* move along if named by extra=": ["0.slopes"],
        "0.kept is a DTensor": ["0.kept"],
    }
    for text, extra in refused.items():
        model = divided(group, rank)
        model[0].table = nn.Buffer(torch.ones(HEADS))
        if extra == ["0.other"]:
            model[0].other = model[0].lent = nn.Parameter(torch.ones(HERE, 7))
        if extra == ["0.kept"]:
            model[0].kept = OF_HEADS[2]()
        segments = [segment_of(model, extra=extra or [])]
        if extra is None:
            model.add_module("more", divided(group, rank)[0])
            second = zr.Segment(["more.qkv"], "more.out", HEAD, kind="heads", on_change=print, extra=["0.scale"])
            segments = [segment_of(model), second]
        with pytest.raises(ValueError, match=text):
            zr.convert(model, process_group=group, segments=segments)


@on_ranks(2)
def test_extra_that_all_ranks_hold_alike_is_refused_unless_it_is_alike_for_all_units(rank, group):
    for make in (torch.ones, lambda *shape: torch.arange(20.0).view(shape)):
        model = divided(group, rank)
        model[0].same = nn.Parameter(make(HERE, HEAD).double())
        zr.convert(model, process_group=group, segments=[segment_of(model, extra=[*EXTRA, "0.slopes", "0.same"])])
        optimizer = torch.optim.AdamW(model.parameters())
        if make is torch.ones:
            zr.Balancer(model, optimizer, zr.BalanceConfig(mode="exact")).close()
            continue
        with pytest.raises(ValueError, match=r"extra: 0\.same is the same on all ranks"):
            zr.Balancer(model, optimizer, zr.BalanceConfig(mode="exact"))
