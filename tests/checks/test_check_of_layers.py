"""Checks of two layers: parts of packed weights, batches, what is detached, arguments."""

import pytest
import torch
from helpers.on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import zeroresize as zr

SIZE, HIDDEN = 8, 32
PACKED = "packed weight is cut across its parts"


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.packed, self.down = nn.Linear(SIZE, 2 * HIDDEN), nn.Linear(HIDDEN, SIZE)

    def forward(self, x):
        gate, up = self.packed(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


class Grouped(nn.Module):
    """q, and k with v, which are cut further."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.packed, self.down = nn.Linear(SIZE, 2 * HIDDEN), nn.Linear(HIDDEN, SIZE)

    def forward(self, x):
        q, kv = self.packed(x).tensor_split([self.packed.weight.shape[0] // 2], dim=-1)
        k, v = kv.unflatten(-1, (2, -1)).unbind(-2)
        return self.down(q * torch.cat([k, v], dim=-1).sin())


def loss(model, batch):
    return model(batch).square().mean()


def split_by_style(model, group, parts):
    mesh = DeviceMesh.from_group(group, "cpu")
    parallelize_module(model, mesh, {"packed": zr.ColwiseParallel(parts=parts), "down": RowwiseParallel()})


def split_by_layer(model, group, parts):
    model.packed = zr.ColumnParallelLinear.from_linear(model.packed, process_group=group, parts=parts)
    model.down = zr.RowParallelLinear.from_linear(model.down, process_group=group)


class Detached(Gated):
    def forward(self, x):
        gate, up = self.packed(x).detach().chunk(2, dim=-1)
        return self.down(gate * up)


def findings(kind, group, split=split_by_layer, parts=2, batch=None):
    model = kind()
    split(model, group, parts)
    return zr.check_parallel(model, torch.ones(3, SIZE) if batch is None else batch, loss)


WRONG = [(PACKED, "packed", "packed.weight")]
PARTS = [
    *((Gated, split_by_style, *case) for case in ((2, []), (1, WRONG), (4, WRONG))),
    *((Gated, split_by_layer, *case) for case in ((2, []), ((32, 32), []), ((16, 48), WRONG))),
    (Grouped, split_by_layer, (32, 16, 16), []),
    (Grouped, split_by_layer, 2, WRONG),
    (Detached, split_by_layer, 2, [("gradient is not the derivative", "packed", "packed.bias")]),
]


@pytest.mark.slow
@on_ranks(2, PARTS)
def test_parts_are_those_of_the_forward_and_what_is_detached_is_no_partial_sum(
    rank, group, kind, split, parts, expected
):
    seen = [(each.cause, each.layer, each.parameter) for each in findings(kind, group, split, parts)]
    if kind is Grouped:  # whose halves are others after a wrong cut
        seen = [each for each in seen if each[0] == PACKED]
    assert seen == expected


@on_ranks(2)
def test_what_ranks_are_given_and_hold_must_be_alike(rank, group):
    for sizes in ((3, 5), (4, 3)):  # named before layers meet
        (other,) = findings(Gated, group, batch=torch.ones(sizes[rank], SIZE))
        assert other.cause == "inputs differ between ranks"
    model = Gated()
    model.norm = nn.LayerNorm(SIZE)
    model.norm.weight.data.uniform_(0.5, 1.5)
    split_by_layer(model, group, 2)
    batch = torch.ones(3, SIZE)
    with pytest.raises(ValueError, match="give the same arguments on every rank"):
        zr.check_parallel(model, batch, loss, **({"reference": Gated} if rank == 0 else {}))
    with pytest.raises(ValueError, match="reference=OrderedDict: wanted is a module"):
        zr.check_parallel(model, batch, loss, reference=model.state_dict())
    model.train(rank == 0)
    assert [each.cause for each in zr.check_parallel(model, batch, loss)] == ["inputs differ between ranks"]
    model.train()
    if rank == 1:  # the same values in another order
        model.norm.weight.data.copy_(model.norm.weight.data.roll(2))
    causes = [each.cause for each in zr.check_parallel(model, batch, of_norm)]
    assert "parameters differ between ranks" in causes


def of_norm(model, batch):
    return model.norm(model(batch)).square().mean()
