"""Checks of two layers: parts of packed weights, batches, what is detached, arguments."""

import pytest
import torch
import torch.distributed as dist
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


@pytest.mark.parametrize("split", [split_by_style, split_by_layer])
def test_parts_are_those_of_the_forward(run_ranks, split):
    def causes(rank, group):
        seen = {}
        for kind, parts in [(Gated, 2), (Gated, (32, 32)), (Gated, 1), (Gated, (16, 48)), (Gated, 4)]:
            model = kind()
            split(model, group, parts)
            seen[parts] = [(each.cause, each.layer) for each in zr.check_parallel(model, torch.ones(3, SIZE), loss)]
        return seen

    wrong = [(PACKED, "packed")]
    expected = {2: [], (32, 32): [], 1: wrong, (16, 48): wrong, 4: wrong}
    assert run_ranks(causes, 2) == [expected] * 2


def test_parts_may_be_cut_in_several_goes(run_ranks):
    def causes(rank, group):
        seen = []
        for parts in ((32, 16, 16), 2):
            model = Grouped()
            split_by_layer(model, group, parts)
            seen.append([each.cause for each in zr.check_parallel(model, torch.ones(3, SIZE), loss)])
        return seen

    for sound, wrong in run_ranks(causes, 2):
        assert PACKED not in sound and PACKED in wrong


@pytest.mark.parametrize("sizes", [(3, 5), (4, 3)])
def test_batches_of_other_sizes_are_named_before_layers_meet(run_ranks, sizes):
    def causes(rank, group):
        model = Gated()
        split_by_layer(model, group, 2)
        assert dist.get_world_size(group) == 2
        return [each.cause for each in zr.check_parallel(model, torch.ones(sizes[rank], SIZE), loss)]

    assert run_ranks(causes, 2) == [["inputs differ between ranks"]] * 2


class Detached(Gated):
    def forward(self, x):
        gate, up = self.packed(x).detach().chunk(2, dim=-1)
        return self.down(gate * up)


def test_what_a_forward_detaches_is_a_backward_that_holds_back_and_no_partial_sum(run_ranks):
    def causes(rank, group):
        model = Detached()
        split_by_layer(model, group, 2)
        return [(each.cause, each.parameter) for each in zr.check_parallel(model, torch.ones(3, SIZE), loss)]

    assert run_ranks(causes, 2) == [[("gradient is not the derivative", "packed.bias")]] * 2


def test_arguments_of_one_rank_alone_are_refused_on_all(run_ranks):
    def check(rank, group):
        model = Gated()
        split_by_layer(model, group, 2)
        reference = {"reference": Gated} if rank == 0 else {}
        with pytest.raises(ValueError, match="give the same arguments on every rank"):
            zr.check_parallel(model, torch.ones(3, SIZE), loss, **reference)
        with pytest.raises(ValueError, match="reference=OrderedDict: wanted is a module"):
            zr.check_parallel(model, torch.ones(3, SIZE), loss, reference=model.state_dict())

    run_ranks(check, 2)


def test_other_modes_and_other_orders_of_weights_are_seen(run_ranks):
    def causes(rank, group):
        model = Gated()
        model.norm = nn.LayerNorm(SIZE)
        model.norm.weight.data.uniform_(0.5, 1.5)
        split_by_layer(model, group, 2)
        batch = torch.ones(3, SIZE)
        model.train(rank == 0)
        modes = zr.check_parallel(model, batch, loss)
        model.train()
        if rank == 1:
            model.norm.weight.data.copy_(model.norm.weight.data.roll(2))
        return [each.cause for each in modes], [each.cause for each in zr.check_parallel(model, batch, of_norm)]

    for modes, orders in run_ranks(causes, 2):
        assert modes == ["inputs differ between ranks"]
        assert "parameters differ between ranks" in orders


def of_norm(model, batch):
    return model.norm(model(batch)).square().mean()
