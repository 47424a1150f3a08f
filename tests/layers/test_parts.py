"""Layers that are split part by part: training, moves and what is saved are those of the undivided model."""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers.on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segments import owned_segments

WIDTH, HEAD, QUERIES, KEYS, INNER = 8, 4, 8, 4, 12
SIZES = {"qkv": (QUERIES * HEAD, KEYS * HEAD, KEYS * HEAD), "mlp.gate_up": 2}


class SwiGlu(nn.Module):
    """With gate and up in one weight."""

    def __init__(self, bias):
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER, bias=bias), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Grouped queries, with q, k and v in one weight, and a feed-forward part."""

    def __init__(self, bias=True):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (QUERIES + 2 * KEYS) * HEAD, bias=bias)
        self.out = nn.Linear(QUERIES * HEAD, WIDTH)
        self.mlp = SwiGlu(bias)
        self.set_groups(range(KEYS))

    def set_groups(self, units):
        self.num_groups = len(units)

    def forward(self, x):
        num_keys = self.num_groups * HEAD
        qkv = self.qkv(x).split([num_keys * QUERIES // KEYS, num_keys, num_keys], dim=-1)
        q, k, v = (one.unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in qkv)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def whole_model(bias=True):
    torch.manual_seed(0)
    return Block(bias).double()


def split(model, by, group):
    if by == "styles":
        styles = {name: zr.ColwiseParallel(parts=parts) for name, parts in SIZES.items()}
        parallelize_module(
            model,
            init_device_mesh("cpu", (2,)),
            styles | {"out": zr.RowwiseParallel(), "mlp.down": zr.RowwiseParallel()},
        )
    else:
        of_group = {"process_group": group}
        for holder, column, row in ((model, "qkv", "out"), (model.mlp, "gate_up", "down")):
            parts = SIZES["qkv" if holder is model else "mlp.gate_up"]
            made = zr.ColumnParallelLinear.from_linear(getattr(holder, column), parts=parts, **of_group)
            setattr(holder, column, made)
            setattr(holder, row, zr.RowParallelLinear.from_linear(getattr(holder, row), **of_group))
    model.set_groups(range(KEYS // 2))
    unit_size = QUERIES // KEYS * HEAD
    segment = zr.Segment(["qkv"], "out", unit_size, kind="KV groups", on_change=model.set_groups, head_size=HEAD)
    return zr.convert(model, process_group=group, segments=[segment])


def train(model, num_steps, after=lambda *_: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(num_steps):
        x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step, optimizer)
        losses.append(loss.item())
    return losses, optimizer


def saved(state, whole=None):
    """What an undivided model, and moments of it, load of a file of this state."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    dcp.save(state, checkpoint_id=folder[0])
    loaded = (whole or whole_model(bias="qkv.bias" in state)).state_dict()
    optimizer = {f"{name}.exp_avg": torch.zeros_like(one) for name, one in loaded.items()}
    dcp.load({**loaded, "optimizer": optimizer} if "optimizer" in state else loaded, checkpoint_id=folder[0])
    return loaded, optimizer


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


def trained_with_moves(by, bias, rank, group):
    """Compare a split model with the undivided one, while it trains and its units move."""
    whole = whole_model(bias)
    expected, of_whole = train(whole, 6)
    moments = {f"{name}.exp_avg": of_whole.state[one]["exp_avg"] for name, one in whole.named_parameters()}
    model = split(whole_model(bias), by, group)
    assert_equal(saved(zr.sharded_state_dict(model))[0], whole_model(bias).state_dict())
    balancers = []

    def step_and_move(step, optimizer):
        balancers[:] = balancers or [zr.Balancer(model, optimizer)]
        balancers[0].step()
        if step in (1, 3):
            balancers[0].move((3, 1) if step == 1 else (1, 1))
            assert local_of(model.qkv.weight).shape[0] == ((48, 16)[rank] if step == 1 else 32)
            assert local_of(model.mlp.gate_up.weight).shape[0] == ((18, 6)[rank] if step == 1 else 12)

    actual, optimizer = train(model, 6, step_and_move)
    assert actual == pytest.approx(expected, rel=1e-9)
    assert [segment.kind for segment in owned_segments(balanced_layers(model))] == ["KV groups", "neurons"]
    model_state, optimizer_state = saved(zr.sharded_state_dict(model, optimizer))
    assert_equal(model_state, whole.state_dict())
    assert_equal(optimizer_state, moments)
    balancers[0].move((3, 1))
    assert_equal(saved(zr.sharded_state_dict(model, optimizer))[0], whole.state_dict())
    balancers[0].move((1, 1))
    if by == "styles":
        assert_gathers(model.state_dict(), whole.state_dict())
        state = {name: optimizer.state[one]["exp_avg"] for name, one in model.named_parameters()}
        assert_gathers(state, {name.removesuffix(".exp_avg"): one for name, one in moments.items()})


@on_ranks(2)
def test_training_moves_and_files_are_those_of_the_undivided_model(rank, group):
    for by, bias in (("from_linear", False), ("styles", True)):
        trained_with_moves(by, bias, rank, group)


def assert_gathers(actual, expected):
    """Whole tensors of equal parts are the undivided model's; of others none are given."""
    for name, tensor in actual.items():
        if not name.startswith("qkv"):
            torch.testing.assert_close(tensor.full_tensor(), expected[name], rtol=0, atol=1e-9)
            continue
        for method in ("full_tensor", "redistribute"):
            with pytest.raises(RuntimeError, match=r"packed layer .*sharded_state_dict"):
                getattr(tensor, method)()
    for name in ("qkv.weight", "mlp.gate_up.weight"):
        with pytest.raises((RuntimeError, dcp.CheckpointException), match="packed layer"):
            dcp.save({name: actual[name]}, checkpoint_id="nowhere")


@on_ranks(2)
def test_drawn_and_row_parallel_layers_hold_their_share_of_each_part(rank, group):
    linear = nn.Linear(12, 4)
    expected = torch.cat([linear.weight[:, rank * 2 : rank * 2 + 2], linear.weight[:, 4 + rank * 4 : 8 + rank * 4]], 1)
    row = zr.RowParallelLinear.from_linear(linear, process_group=group, parts=(4, 8))
    assert torch.equal(row.weight, expected)
    torch.manual_seed(3)
    drawn = zr.ColumnParallelLinear(4, 12, process_group=group, parts=3)
    torch.manual_seed(3)
    whole = nn.Linear(4, 12)
    assert torch.equal(drawn.weight, whole.weight.unflatten(0, (3, 2, 2))[:, rank].flatten(0, 1))
    by_style = nn.Linear(12, 4)
    by_style.load_state_dict(linear.state_dict())
    parallelize_module(by_style, init_device_mesh("cpu", (2,)), zr.RowwiseParallel(parts=(4, 8)))
    assert torch.equal(local_of(by_style.weight), expected)
    loaded = saved(zr.sharded_state_dict(by_style), nn.Linear(12, 4))[0]
    assert_equal(loaded, linear.state_dict())
    torch.manual_seed(3)
    by_style.reset_parameters()
    torch.manual_seed(3)
    drawn = nn.Linear(12, 4)
    assert_equal(saved(zr.sharded_state_dict(by_style), nn.Linear(12, 4))[0], drawn.state_dict())
    for wrong in (0, 5, (6, 5), (5, 7), "3", True):
        with pytest.raises(ValueError, match="parts="):
            zr.ColumnParallelLinear.from_linear(nn.Linear(4, 12), process_group=group, parts=wrong)
        with pytest.raises(ValueError, match="ColwiseParallel: parts="):
            parallelize_module(nn.Linear(4, 12), init_device_mesh("cpu", (2,)), zr.ColwiseParallel(parts=wrong))
    with pytest.raises(ValueError, match="not allowed with gather_output=True"):
        zr.ColumnParallelLinear(4, 12, process_group=group, parts=3, gather_output=True)
    with pytest.raises(ValueError, match="stay divided"):
        parallelize_module(
            nn.Linear(4, 12), init_device_mesh("cpu", (2,)), zr.ColwiseParallel(parts=3, use_local_output=False)
        )
