"""fully_shard over replicas around layers whose units are divided unevenly, and move."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import query_heads
from helpers.dtensor_models import adamw, batch, whole_model
from helpers.fsdp2 import Training, dtensor_decoder, grid_of, plain_decoder, sharded, undivided
from helpers.on_ranks import on_ranks
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

import zeroresize as zr
from zeroresize.resharding import fully_sharded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

DECODERS = {"plain": plain_decoder, "DTensor": dtensor_decoder}
#: Of losses, norms and weights in float64.
TOLERANCE = 1e-10


def neurons_of(model):
    return model.blocks[0].mlp.down.segment.owned.counts


def balanced(kind, grid, *, convert_options=None, mode="off", **config):
    """A decoder, shared by replicas, in training."""
    model = sharded(DECODERS[kind](grid, **(convert_options or {})), grid)
    optimizer = adamw(model)
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode=mode, **config), process_group=grid["tp"])
    return balancer, Training(model, optimizer, [grid["dp"].get_local_rank()])


def assert_as_undivided(results, folder):
    """Losses and norms of each rank are those of one process, and so are the weights in a checkpoint."""
    expected, weights = undivided(len(results[0]))
    for rank, steps in enumerate(results):
        for number, ((losses, norm), (of_all, norm_of_all)) in enumerate(zip(steps, expected, strict=True)):
            replica = rank // 2
            of_replica = of_all[replica * len(losses) : (replica + 1) * len(losses)]
            assert [*losses, norm] == pytest.approx([*of_replica, norm_of_all], rel=TOLERANCE), (rank, number)
    loaded = whole_model().state_dict()
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    for name, tensor in weights.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def assert_whole_model_in(folder):
    expected = whole_model().state_dict()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("by", ["convert", "Balancer"])
def test_uneven_shares_from_the_start_train_as_the_undivided_model(run_ranks, tmp_path, kind, by):
    def check(rank, group):
        options = {"convert_options": {"shares": (5, 3)}} if by == "convert" else {"shares": (5, 3)}
        balancer, training = balanced(kind, grid_of(), **options)
        assert neurons_of(training.model) == (30, 18)
        steps = [training.step() for _ in range(3)]
        dcp.save(zr.sharded_state_dict(training.model, training.optimizer), checkpoint_id=tmp_path)
        balancer.close()
        return steps

    assert_as_undivided(run_ranks(check, 4), tmp_path)


@pytest.mark.versions
@pytest.mark.parametrize("kind", DECODERS)
def test_units_that_move_between_steps_leave_training_that_of_the_undivided_model(run_ranks, tmp_path, kind):
    """Also behind an evaluation, which leaves gathered what the root has; shards have different sizes, some none."""
    moves = {0: (5, 3), 2: (1, 0), 4: (1, 1), 5: (1, 2)}

    def check(rank, group):
        balancer, training = balanced(kind, grid_of())
        model, optimizer = training.model, training.optimizer
        parameters, down = list(model.parameters()), model.blocks[0].mlp.down.weight
        steps, neurons = [], []
        for step in range(7):
            steps.append(training.step())
            with torch.no_grad():
                model(batch(step))
            balancer.step()
            if step in moves:
                balancer.move(moves[step])
            neurons.append(neurons_of(model))
        assert neurons == [(30, 18), (30, 18), (47, 1), (47, 1), (24, 24), (16, 32), (16, 32)]
        assert {tuple(value.shape) for value in optimizer.state[down].values() if value.ndim} == {tuple(down.shape)}
        dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path)
        assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
        balancer.close()
        return steps

    assert_as_undivided(run_ranks(check, 4), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECODERS)
def test_training_is_resumed_by_another_division(run_ranks, tmp_path, kind):
    def check(rank, group):
        grid = grid_of()
        results = []
        for folder, shares in ((None, (5, 3)), (tmp_path, (1, 1))):
            balancer, training = balanced(kind, grid, shares=(1, 2) if folder else "even")
            state = zr.sharded_state_dict(training.model, training.optimizer)
            if folder:
                dcp.load(state, storage_reader=zr.CheckpointReader(folder))
                training.num_steps = 2
                balancer.move(shares)
            else:
                for _ in range(2):
                    training.step()
                balancer.move(shares)
                dcp.save(state, checkpoint_id=tmp_path)
            training.scheduler = torch.optim.lr_scheduler.ConstantLR(training.optimizer, 1.0)
            results.append([training.step() for _ in range(2)])
            balancer.close()
        for (losses, norm), (of_first, norm_of_first) in zip(*results, strict=True):
            assert [*losses, norm] == pytest.approx([*of_first, norm_of_first], rel=TOLERANCE)

    run_ranks(check, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("failing_call", ["room_for", "gather", "sharded"])
def test_where_one_rank_fails_nothing_moves_on_any(run_ranks, tmp_path, monkeypatch, kind, failing_call):
    """It fails as a second segment is gathered or sharded, once the first has moved: that goes back."""

    def check(rank, group):
        balancer, training = balanced(kind, grid_of())
        model, call, calls = training.model, getattr(fully_sharded.FullySharded, failing_call), []
        steps = [training.step() for _ in range(2)]

        def failing(self, *arguments):
            calls.append(self)
            result = call(self, *arguments)
            if rank == 3 and tuple(self.shape) == (16, 24):  # the feed-forward part's, behind attention
                raise MemoryError("none left")
            return result

        with monkeypatch.context() as patched:
            patched.setattr(fully_sharded.FullySharded, failing_call, failing)
            began = time.perf_counter()
            with pytest.raises(RuntimeError, match=r"nothing has (moved or )?changed: .*none left"):
                balancer.move((5, 3))
            assert time.perf_counter() - began < 5
        assert calls and neurons_of(model) == (24, 24) and balancer.plan.owned == (1.0, 1.0)
        assert {segment.owned.is_home for segment in balancer._parts.group.units.segments} == {True}
        steps.append(training.step())
        balancer.move((5, 3))
        assert neurons_of(model) == (30, 18)
        steps += [training.step() for _ in range(2)]
        dcp.save(zr.sharded_state_dict(model, training.optimizer), checkpoint_id=tmp_path)
        balancer.close()
        return steps

    assert_as_undivided(run_ranks(check, 4), tmp_path)


@on_ranks(4)
def test_gradients_that_are_not_reduced_yet_keep_units_where_they_are(rank, group):
    balancer, training = balanced("plain", grid_of())
    training.model.set_requires_gradient_sync(False)
    training.model(batch(0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"has gradients that it has not reduced, .*set_requires_gradient_sync"):
        balancer.move((5, 3))
    assert balancer._parts.group.units.why_not_now() is None  # it would be told as a reason for good
    training.model.set_requires_gradient_sync(True)
    training.model(batch(0)).sum().backward()
    gradient = training.model.blocks[0].mlp.down.weight.grad
    norm = zr.clip_grad_norm_(training.model.parameters(), 1e9)
    balancer.move((5, 3))  # gradients go along
    assert training.model.blocks[0].mlp.down.weight.grad.shape == (16, (30, 18)[rank % 2]) != gradient.shape
    torch.testing.assert_close(zr.clip_grad_norm_(training.model.parameters(), 1e9), norm, rtol=1e-12, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECODERS)
def test_what_is_being_gathered_when_units_move_is_not_used(run_ranks, tmp_path, kind):
    def check(rank, group):
        balancer, training = balanced(kind, grid_of())
        steps = [training.step()]
        training.model.blocks[0].unshard(async_op=True)
        balancer.move((5, 3))
        steps.append(training.step())
        dcp.save(zr.sharded_state_dict(training.model, training.optimizer), checkpoint_id=tmp_path)
        balancer.close()
        return steps

    assert_as_undivided(run_ranks(check, 4), tmp_path)


@pytest.mark.slow
@on_ranks(4)
def test_what_is_gathered_stays_so_until_units_move_or_are_saved(rank, group):
    balancer, training = balanced("DTensor", grid_of())
    training.step()
    balancer.move((5, 3))
    training.step()
    units, block = balancer._parts.group.units, training.model.blocks[0]
    weight, num_bytes = block.mlp.down.weight, units.bytes_of_units
    block.unshard()
    units._is_guarded = False
    balancer.step()
    assert units._is_guarded and units.bytes_of_units == num_bytes
    assert block.mlp.down.weight is not weight
    zr.sharded_state_dict(training.model)
    assert block.mlp.down.weight is weight


@pytest.mark.parametrize("how", ["several dimensions", "offloaded"])
def test_dtensor_layers_whose_shards_are_fixed_are_saved_at_home_as_their_placements_tell(run_ranks, tmp_path, how):
    def check(rank, group):
        mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("copies", "dp", "tp"))
        options = {"mesh": mesh["copies", "dp"]}
        if how == "offloaded":
            options = {"mesh": mesh["dp"], "offload_policy": CPUOffloadPolicy(False)}
        model = fully_shard(dtensor_decoder({"tp": mesh["tp"]}), **options)
        dcp.save(zr.sharded_state_dict(model, adamw(model)), checkpoint_id=tmp_path)
        model = fully_shard(dtensor_decoder({"tp": mesh["tp"]}, shares=(5, 3)), **options)
        with pytest.raises(ValueError, match="fully_shard has divided a part of a tensor further"):
            zr.sharded_state_dict(model)

    run_ranks(check, 4)
    assert_whole_model_in(tmp_path)


@pytest.mark.parametrize("kind", DECODERS)
def test_what_replicate_makes_is_not_taken_for_shards(run_ranks, tmp_path, kind):
    def check(rank, group):
        grid = grid_of()
        model = DECODERS[kind](grid)
        replicate(model, mesh=grid["dp"])
        balancer = zr.Balancer(model, adamw(model), zr.BalanceConfig(mode="off"), process_group=grid["tp"])
        with pytest.raises(ValueError, match=r"no unit can change hands: .* is a DTensor by replicate\(\), which does"):
            balancer.move((5, 3))
        dcp.save(zr.sharded_state_dict(model), checkpoint_id=tmp_path)

    run_ranks(check, 4)
    assert_whole_model_in(tmp_path)


def on_two_dimensions(model, grid):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("copies", "dp", "tp"))
    fully_shard(model, mesh=mesh["copies", "dp"])


#: How a model is sharded, and what a move says.
FIXED = (
    (on_two_dimensions, "over a mesh of more than one dimension"),
    (lambda model, grid: fully_shard(model, mesh=grid["dp"], offload_policy=CPUOffloadPolicy(False)), "CPUOffload"),
    (
        lambda model, grid: fully_shard(
            model, mesh=grid["dp"], shard_placement_fn=lambda one: Shard(one.dim() - 1) if one.dim() > 1 else None
        ),
        "along another dimension than the first",
    ),
)


@on_ranks(4, FIXED)
def test_what_is_not_known_to_be_sharded_anew_is_refused_by_name(rank, group, shard, why):
    grid = grid_of()
    model = plain_decoder(grid)
    shard(model, grid)
    balancer = zr.Balancer(model, adamw(model), zr.BalanceConfig(mode="off"), process_group=grid["tp"])
    with pytest.raises(ValueError, match=rf"no unit can change hands: .* as with fully_shard {why}|{why}"):
        balancer.move((5, 3))
    balancer.close()
    with pytest.raises(ValueError, match=r"sharded_state_dict: fully_shard has divided a part of a tensor further"):
        zr.sharded_state_dict(model)


@on_ranks(4)
def test_a_rank_keeps_some_units_as_fully_shard_fails_where_a_parameter_is_empty(rank, group):
    grid = grid_of()
    with pytest.raises(RuntimeError, match="expects non-empty tensor"):  # of torch alone
        empty = fully_shard(nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 4)), mesh=grid["dp"])
        empty(torch.ones(2, 4)).sum().backward()
    model = fully_shard(plain_decoder(grid, shares=(1, 0)), mesh=grid["dp"])
    with pytest.raises(ValueError, match=r"a rank has no .* and fully_shard fails in the backward of an empty"):
        zr.Balancer(model, adamw(model), zr.BalanceConfig(mode="off"), process_group=grid["tp"])


@pytest.mark.slow
@on_ranks(4)
def test_under_grouped_queries_whole_groups_move(rank, group):
    grid = grid_of()
    tensor_parallel = grid["tp"].get_group()
    whole = query_heads.whole_model(2)
    expected = query_heads.train(whole, adamw(whole), 4, nn.utils.clip_grad_norm_)
    model = fully_shard(query_heads.divided(tensor_parallel, 2), mesh=grid["dp"])
    optimizer = adamw(model)
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="off"), process_group=tensor_parallel)
    values = query_heads.train(model, optimizer, 2, zr.clip_grad_norm_, balancer.step)
    balancer.move((3, 1))
    assert query_heads.counts_of(model) == [(6, 2), (6, 2)]
    values += query_heads.train(model, optimizer, 2, zr.clip_grad_norm_, balancer.step)
    assert values == pytest.approx(expected, rel=TOLERANCE)

    apart = fully_shard(query_heads.divided(tensor_parallel, 8), mesh=grid["dp"])  # a group for two ranks
    optimizer = adamw(apart)
    balancer = zr.Balancer(apart, optimizer, zr.BalanceConfig(mode="off"), process_group=tensor_parallel)
    with pytest.raises(ValueError, match="several ranks hold rows that units share, and fully_shard divides"):
        balancer.move((3, 1))
    apart(query_heads.X).sum().backward()
    with pytest.raises(RuntimeError, match=r"several ranks hold rows of layer 0\.k, and fully_shard has divided"):
        optimizer.step()
