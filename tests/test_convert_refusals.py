"""What convert refuses on every rank at once, and what a converted model refuses: files of shards."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.hosts import build, split
from helpers.processes import for_each
from torch import nn
from torch.distributed.tensor import Replicate

import zeroresize as zr
from zeroresize import ColumnParallelLinear, RowParallelLinear
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import owned_segments


def model_of(group):
    torch.manual_seed(0)
    layers = (ColumnParallelLinear(8, 16, process_group=group), RowParallelLinear(16, 8, process_group=group))
    return nn.Sequential(layers[0], nn.Softmax(-1), layers[1])


def named(**options):
    return [zr.Segment(["0"], "2", **options)]


#: What the ranks give to ``convert(segments=, shares=)``, and what both of them are told.
DIFFERENT = {
    "a mistake on one rank": (
        [named(), named(unit_size=3)],
        [(2, 1), (2, 1)],
        r"rank 1 of the group failed: Segment.* of unit_size=3|Segment.* of unit_size=3",
    ),
    "min_units": (
        [named(), named(min_units=2)],
        [(2, 1), (2, 1)],
        "in min_units of the segment of 2, rank 0: 1; rank 1: 2",
    ),
    "unit_size": (
        [named(), named(unit_size=2)],
        [(2, 1), (2, 1)],
        "in units of the segment of 2, rank 0: 16; rank 1: 8",
    ),
    "no segment": ([named(), []], [(2, 1), (2, 1)], "rank 0: 1, not on all ranks: 2; rank 1: 0"),
    "shares": ([named(), named()], [(2, 1), (1, 2)], r"in shares=, rank 0: \[1\.3.*; rank 1: \[0\.6"),
}


def test_ranks_that_mean_different_segments_hear_of_it_at_once(run_ranks):
    @for_each(DIFFERENT.values())
    def check(rank, group, segments, shares, message):
        model = model_of(group)
        weights = [one.detach().clone() for one in model.parameters()]
        with pytest.raises(ValueError, match=message):
            zr.convert(model, process_group=group, segments=segments[rank], shares=shares[rank])
        assert all(map(torch.equal, weights, model.parameters()))
        zr.convert(model, process_group=group, segments=named(), shares=(3, 1))
        assert owned_segments(balanced_layers(model))[0].owned.counts == (12, 4)

    run_ranks(check, 2, timeout_s=20)


def test_a_rank_whose_model_has_no_layer_leaves_nobody_waiting(run_ranks):
    def check(rank, group):
        model = model_of(group) if rank == 0 else nn.Sequential(nn.Linear(8, 8))
        with pytest.raises(ValueError, match="the model has no layer that can be balanced"):
            zr.convert(model, process_group=group, shares=(2, 1))

    run_ranks(check, 2, timeout_s=20)


def test_save_pretrained_never_writes_a_rank_s_shards(run_ranks, tmp_path):
    def check(rank, group):
        model = split(build("Llama"), group)
        zr.convert(model, process_group=group)
        balancer = zr.Balancer(
            model, torch.optim.SGD(model.parameters()), process_group=group, config=zr.BalanceConfig(mode="exact")
        )
        for folder in (tmp_path / "away", tmp_path / "home"):
            with balancer.at_home(), pytest.raises(RuntimeError, match=r"shards .* whole model.*sharded_state_dict"):
                model.save_pretrained(folder)
            assert not folder.exists()
        dcp.save(zr.sharded_state_dict(model), checkpoint_id=str(tmp_path / "sharded"))
        if rank == 0:
            whole = build("Llama")
            expected = {name: one.clone() for name, one in whole.state_dict().items()}
            for parameter in whole.parameters():
                nn.init.zeros_(parameter)
            state = whole.state_dict()
            dcp.load(state, checkpoint_id=str(tmp_path / "sharded"), no_dist=True)
            model.save_pretrained(tmp_path / "given", state_dict=state)
            saved = type(whole).from_pretrained(tmp_path / "given", torch_dtype=torch.float64).state_dict()
            assert all(torch.equal(saved[name], one) for name, one in expected.items())

    run_ranks(check, 2)


def test_save_pretrained_tells_parts_from_the_whole_however_units_lie(run_ranks):
    def check(rank, group):
        saved = []

        class Model(nn.Sequential):
            def save_pretrained(self, folder, state_dict=None):
                saved.append(folder)

        model = Model(*model_of(group), nn.Linear(8, 8))
        even = model.state_dict()
        zr.convert(model, process_group=group, segments=named(min_units=0), shares=(1, 0))
        held = dict(model.named_parameters())
        whole = {"0.weight": torch.zeros(16, 8), "0.bias": torch.zeros(16), "2.weight": torch.zeros(8, 16)}
        model.save_pretrained("whole", state_dict=whole)
        if rank == 0:  # it has all units
            model.save_pretrained("own", state_dict=held)
        for state in [even] if rank == 0 else [even, held]:
            with pytest.raises(RuntimeError, match=r"given is 0\.weight of shape"):
                model.save_pretrained("parts", state_dict=state)
        # Of another module that has the same name but for a prefix.
        model.add_module("other", nn.Sequential(nn.Linear(8, 8)))
        model.save_pretrained("other", state_dict={**whole, "other.0.weight": torch.zeros(8, 8)})
        # A wrapper's names end alike: the other module's tensor must not hide this layer's part, nor pass for one.
        wrapped = {"module.other.0.weight": torch.zeros(8, 8), "module.0.weight": even["0.weight"]}
        with pytest.raises(RuntimeError, match=r"given is module\.0\.weight of shape"):
            model.save_pretrained("parts", state_dict=wrapped)
        model.save_pretrained("less", state_dict={"other.0.weight": torch.zeros(8, 8)})
        return saved

    saved = run_ranks(check, 2)
    assert saved == [["whole", "own", "other", "less"], ["whole", "other", "less"]]


def test_a_model_of_dtensors_is_told_the_way(run_ranks):
    def check(rank, group):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import distribute_module
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        fully_shard(model, mesh=mesh)
        with pytest.raises(ValueError, match=r"4 of its parameters are DTensors.*0\.weight.*left alone: none"):
            zr.convert(model, process_group=group)
        unknown = distribute_module(nn.Linear(8, 8), mesh, None, lambda mod, x, mesh: x, lambda mod, y, mesh: y)
        with pytest.raises(ValueError, match=r"left alone: : how it was split is not known: .*lambda> prepares its in"):
            zr.convert(unknown, process_group=group)
        gathered = nn.Sequential(nn.Linear(8, 8))
        parallelize_module(gathered, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
        with pytest.raises(ValueError, match=r"left alone: 0: gather_output=True"):
            zr.convert(gathered, process_group=group)

    run_ranks(check, 2)
