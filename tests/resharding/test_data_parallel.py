"""Units move inside DistributedDataParallel: its reducer is built anew, and reduces as before."""

import pytest
import torch
import torch.distributed as dist
from helpers import parallel_layers
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import everything_of, segments_of, uneven
from helpers.processes import for_each
from torch.nn.parallel import DistributedDataParallel

from zeroresize.resharding.data_parallel import wrappers_of
from zeroresize.resharding.units.moving_units import move_units

pytestmark = [pytest.mark.slow, pytest.mark.versions]


def loss_of(model, step, sample=0):
    generator = torch.Generator().manual_seed(10 * step + sample)
    return model(torch.randn(2, 3, parallel_layers.WIDTH, generator=generator, dtype=torch.float64)).square().mean()


def train(model, optimizer, steps, sample=0):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(loss_of(model, step, sample))
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses)


OPTIONS = [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}]


def test_replicas_train_on_as_without_moves(run_ranks):
    """2 × 2 ranks: tensor-parallel [0, 1] and [2, 3], replicas [0, 2] and [1, 3]."""

    @for_each([[options] for options in OPTIONS])
    def check(rank, _, options):
        tensor_parallel = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
        runs = []
        for _ in range(2):
            inner = parallel_layers.block(tensor_parallel)
            model = DistributedDataParallel(inner, process_group=replicas, bucket_cap_mb=0.001, **options)
            runs.append((model, segments_of(inner, tensor_parallel), torch.optim.AdamW(model.parameters(), lr=1e-2)))
        (model, segments, optimizer), (other, other_segments, other_optimizer) = runs
        assert wrappers_of(model.module) == wrappers_of(model) == (model,)  # it may be around what is asked for
        for turn, targets in enumerate([uneven(2), uneven(2, 1), uneven(2, 2)]):
            steps = range(3 * turn, 3 * turn + 3)
            losses = train(model, optimizer, steps, sample=rank // 2)
            torch.testing.assert_close(losses, train(other, other_optimizer, steps, rank // 2), rtol=1e-10, atol=1e-10)
            move_units(segments, targets, process_group=tensor_parallel, optimizer=optimizer, model=model.module)
        train(model, optimizer, range(9, 12), rank // 2)
        train(other, other_optimizer, range(9, 12), rank // 2)
        wholes = everything_of(segments, optimizer, tensor_parallel)
        for name, wanted in everything_of(other_segments, other_optimizer, tensor_parallel).items():
            torch.testing.assert_close(wholes[name], wanted, rtol=1e-10, atol=1e-10, msg=name)
        return model.module[2].weight

    results = run_ranks(check, 4)
    for first, *others in zip(*results, strict=True):
        assert all(torch.equal(first, other) for other in others)  # gradients were reduced over both groups


@on_ranks(2)
def test_hooks_of_communication_and_gradients_under_no_sync_stay(rank, group):
    alone = [dist.new_group([one]) for one in range(2)][rank]
    inner = parallel_layers.block(group)
    model = DistributedDataParallel(inner, process_group=alone)
    sizes = []

    def hook(state, bucket):
        state.append(bucket.buffer().numel())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(sizes, hook)
    segments = segments_of(inner, group)
    with model.no_sync():
        loss_of(model, 0).backward()
    assert not sizes
    move_units(segments, uneven(2), process_group=group, optimizer=None, model=inner)
    loss_of(model, 1).backward()
    assert sum(sizes) == sum(one.numel() for one in inner.parameters())
    other = parallel_layers.block(group)
    for step in range(2):
        loss_of(other, step).backward()
    tensors = everything_of(segments, None, group)
    for name, wanted in everything_of(segments_of(other, group), None, group).items():
        torch.testing.assert_close(tensors[name], wanted, rtol=1e-10, atol=1e-10, msg=name)


@on_ranks(2)
def test_what_cannot_be_built_anew_is_refused_before_anything_moves(rank, group, *, monkeypatch):
    alone = [dist.new_group([one]) for one in range(2)][rank]
    inner = parallel_layers.block(group)
    model = DistributedDataParallel(inner, process_group=alone)
    segments = segments_of(inner, group)

    def refusal():
        with pytest.raises(RuntimeError, match="its buffers cannot be made anew: ") as caught:
            move_units(segments, uneven(2), process_group=group, optimizer=None, model=inner)
        assert segments[1].owned.is_home and len(inner[1].up.weight) == 12
        return str(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(DistributedDataParallel, "_ddp_init_helper", lambda self, other: None)
        assert "this version of torch builds reducers differently" in refusal()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    assert "the built-in communication hook" in refusal()
    loss_of(inner, 0).backward()
