"""Pieces of a divided tensor, and what may not be done with it."""

import copy
import io
import itertools
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import block, segments_of, uneven
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import zeroresize as zr
from zeroresize.checkpoints.checksums import CHECKSUMS, Checksums
from zeroresize.checkpoints.divided_tensor import DividedTensor, TensorDivision
from zeroresize.plan.layout import Piece, unit_pieces
from zeroresize.resharding.units.moving_units import move_units
from zeroresize.utils.torch_private import strided_shard

pytestmark = pytest.mark.slow


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_units_of_all_ranks_are_the_whole_tensor_in_its_order(owners, rows):
    """The whole is numbered part by part, unit by unit, row by row; a rank holds the same with fewer units."""
    num_units = len(owners)
    numbers = np.arange(num_units * sum(rows))
    of_parts = np.split(numbers, num_units * np.cumsum(rows)[:-1])
    whole = np.full_like(numbers, -1)
    for rank in range(4):
        units = np.flatnonzero(np.asarray(owners) == rank)
        held = np.concatenate([part.reshape(num_units, -1)[units].reshape(-1) for part in of_parts])
        pieces = unit_pieces(units, num_units, rows)
        assert sum(piece.length for piece in pieces) == len(held)
        for begin, local_begin, length in pieces:
            assert length > 0
            assert (whole[begin : begin + length] == -1).all()
            whole[begin : begin + length] = held[local_begin : local_begin + length]
        assert all(one.begin + one.length < other.begin for one, other in itertools.pairwise(pieces))
    assert (whole == numbers).all()


def divided():
    return DividedTensor(
        "fc1.weight", torch.arange(6.0).view(2, 3), TensorDivision(0, 4, lambda: [Piece(2, 0, 2)]), Checksums()
    )


def test_a_divided_tensor_has_the_whole_shape_and_can_be_copied():
    part = divided()
    assert part.shape == (4, 3) and part.dtype == torch.float32
    for other in (part.clone(), part.to(torch.float64)):
        assert other.local.data_ptr() != part.local.data_ptr()
        assert torch.equal(other.local.float(), part.local)
        (chunk,) = other.__create_chunk_list__()
        assert (tuple(chunk.offsets), tuple(chunk.sizes)) == ((2, 0), (2, 3))


def test_nothing_but_a_checkpoint_takes_a_divided_tensor():
    for use in (
        pickle.dumps,
        lambda one: torch.save({"weight": one}, io.BytesIO()),
        lambda one: nn.Linear(3, 4).load_state_dict({"weight": one}, strict=False),
        lambda one: one + 1.0,
    ):
        with pytest.raises(RuntimeError, match=r"torch\.distributed\.checkpoint only"):
            use(divided())


def test_an_optimizers_part_is_refused_within_another_dictionary(tmp_path):
    model = nn.Linear(2, 2)
    state = {"all": zr.sharded_state_dict(model, torch.optim.SGD(model.parameters()))}
    with pytest.raises(dcp.CheckpointException, match="not within another dictionary"):
        dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)


def test_layers_that_are_not_converted_are_saved_evenly_and_another_models_are_refused(run_ranks, tmp_path):
    folder = str(tmp_path / "checkpoint")
    torch.manual_seed(0)
    whole = nn.Linear(4, 6)

    def save(rank, group):
        column = zr.ColumnParallelLinear.from_linear(whole, process_group=group, gather_output=True)
        row = zr.RowParallelLinear.from_linear(whole, process_group=group)
        dcp.save(zr.sharded_state_dict(nn.ModuleDict({"column": column, "row": row})), checkpoint_id=folder)
        other = nn.Sequential(zr.ColumnParallelLinear(4, 6, process_group=group))
        with pytest.raises(dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: 0\.bias"):
            dcp.load(zr.sharded_state_dict(other), checkpoint_id=folder)
        wider = nn.ModuleDict({"column": zr.ColumnParallelLinear(4, 8, process_group=group)})
        with pytest.raises(dcp.CheckpointException, match=r"Size mismatch.*6.*8.* for column\.bias"):
            dcp.load(zr.sharded_state_dict(wider), checkpoint_id=folder)

    run_ranks(save, 2)
    loaded = nn.ModuleDict({"column": nn.Linear(4, 6), "row": nn.Linear(4, 6)})
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    for name in ("column", "row"):
        assert torch.equal(state[f"{name}.weight"], whole.weight) and torch.equal(state[f"{name}.bias"], whole.bias)


class Foreign(nn.Module):
    """A parallel layer of a library that is not known."""

    def __init__(self, group):
        super().__init__()
        self.process_group = group
        self.weight = nn.Parameter(torch.zeros(3, 4))


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"scale": 1.0}


@on_ranks(2)
def test_what_may_be_divided_in_an_unknown_way_is_an_error(rank, group):
    with pytest.raises(ValueError, match=r"embed\.weight \(shape \(3, 4\) on this rank\) belongs to a layer with"):
        zr.sharded_state_dict(nn.ModuleDict({"embed": Foreign(group)}))
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert list(zr.sharded_state_dict(nn.ModuleDict({"embed": Foreign(alone)}))) == ["embed.weight", CHECKSUMS]
    norm = nn.SyncBatchNorm(3, process_group=group)
    assert len(zr.sharded_state_dict(norm)) == 6
    normed = nn.utils.parametrizations.weight_norm(zr.ColumnParallelLinear(4, 6, process_group=group))
    with pytest.raises(ValueError, match="how it is divided over its ranks is not known"):
        zr.sharded_state_dict(normed)
    with pytest.raises(ValueError, match="has extra state"):
        zr.sharded_state_dict(nn.Sequential(WithExtraState(2, 2)))
    model = block(group)
    segments = segments_of(model, group)
    for segment in segments:
        for where in segment.tensors:
            where.owner.segment = segment
    move_units(segments, uneven(2), process_group=group, optimizer=None)
    with pytest.raises(ValueError, match="is it a copy of a layer that was divided unevenly"):
        zr.sharded_state_dict(copy.deepcopy(model))


@on_ranks(2)
def test_an_optimizer_that_cannot_be_saved_is_an_error(rank, group):
    class Factored(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 1.0})

        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["row"] = torch.zeros(len(parameter) + 1)

    model = nn.Sequential(zr.ColumnParallelLinear(4, 6, process_group=group), nn.Linear(6, 1))
    with pytest.raises(ValueError, match=r"steps 1 tensors that are no parameters of the model.*shape \(7,\)"):
        zr.sharded_state_dict(model, torch.optim.SGD([*model.parameters(), torch.zeros(7)]))
    with pytest.raises(ValueError, match=r"keeps 'row' of shape \(4,\) beside 0\.weight of shape \(3, 4\)"):
        zr.sharded_state_dict(model, Factored(model.parameters()))
    with pytest.raises(ValueError, match=r"LBFGS has no state of 0\.weight yet.*let it make a step"):
        zr.sharded_state_dict(model, torch.optim.LBFGS(model.parameters()))
    whole = nn.Linear(6, 1)
    assert "optimizer" in zr.sharded_state_dict(whole, Factored(whole.parameters()))


def test_of_a_shard_only_the_padding_that_lies_in_it_counts():
    """Of six rows on this rank the last is padding, beyond a whole of ten; four ranks shard them by two."""
    for rows, held in (
        ((0, 2), ([Piece(5, 0, 2)], 0, 2)),
        ((2, 4), ([Piece(7, 0, 2)], 0, 2)),
        ((4, 6), ([Piece(9, 0, 1)], 0, 2)),
        ((6, 6), ([], 0, 0)),
    ):
        assert TensorDivision(0, 10, lambda: [Piece(5, 0, 5)], 1, lambda rows=rows: rows).held() == held
        division = TensorDivision(1, 10, lambda: [Piece(5, 0, 5)], 1, lambda rows=rows: rows)
        assert division.held() == ([Piece(5, 0, 5)] if rows != (6, 6) else (), rows[0], 6)


@on_ranks(4)
def test_dtensors_of_parts_are_saved_and_loaded_whole(rank, group, *, tmp_path):
    """Ranks hold a share of each part, as of gate and up in one; ``fully_shard`` may have divided rows besides."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(6.0 * 12 * 2).view(6, 12, 2)
    for number, (mesh, placements) in enumerate(
        [
            (grid["tp"], [strided_shard(1, 3)]),
            (grid["tp"], [strided_shard(0, 3)]),
            (grid, [Replicate(), strided_shard(1, 2)]),
            (grid, [Shard(0), strided_shard(1, 2)]),
            (grid, [strided_shard(1, 2), Shard(1)]),  # one division of what the other has left, by no parts
        ]
    ):
        model, other = nn.Module(), nn.Module()
        model.weight = nn.Parameter(distribute_tensor(whole, mesh, placements))
        other.weight = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, placements))
        dcp.save(zr.sharded_state_dict(model), checkpoint_id=tmp_path / str(number))
        read = {"weight": torch.zeros_like(whole)}
        dcp.load(read, checkpoint_id=tmp_path / str(number), no_dist=True)
        assert torch.equal(read["weight"], whole), placements
        dcp.load(zr.sharded_state_dict(other), checkpoint_id=tmp_path / str(number))
        assert torch.equal(other.weight.to_local(), model.weight.to_local()), placements
