"""check_parallel leaves a model as it was, fails on all ranks alike, and measures derivatives rightly."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from decoders import batch, loss, split, whole
from helpers.on_ranks import on_ranks
from plain_cases import change
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroresize as zr


def trained_once(group):
    """A divided model with gradients, a running statistic, hooks and an optimizer with state."""
    model = split(whole(dropout=0.1), group).float().train()
    model.counts = nn.BatchNorm1d(16, affine=False)
    kind = type(model)
    change(model, forward=lambda self, x: (self.counts(self.embed(x).flatten(0, 1)), kind.forward(self, x))[1])
    model.norm.weight.register_hook(lambda gradient: gradient)
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, batch()).backward()
    optimizer.step()
    return model, optimizer


def state_of(model, optimizer):
    """All of it, with the identity of what must stay the same object."""
    held = {f"{name} {id(one)} {id(one.grad)}": (one, one.grad) for name, one in model.named_parameters()}
    modules = {
        name: (each.training, type(each), list(each._forward_hooks), list(each._forward_pre_hooks), sorted(vars(each)))
        for name, each in model.named_modules()
    }
    generators = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    hooks = [list(one._backward_hooks or ()) for one in model.parameters()]
    state = held, dict(model.named_buffers()), optimizer.state_dict()
    return torch.utils._pytree.tree_map(
        lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (state, modules, generators, hooks)
    )


def assert_same(before, after):
    for was, now in zip(*(torch.utils._pytree.tree_leaves(state) for state in (before, after)), strict=True):
        assert torch.equal(was, now) if isinstance(was, torch.Tensor) else was == now


def failing_from(call):
    """A loss that fails on rank 1 from some call on."""
    calls = []

    def failing_loss(model, given):
        calls.append(loss(model, given))
        if len(calls) >= call and dist.get_rank() == 1:
            raise KeyError("no such target")
        return calls[-1]

    return failing_loss


@on_ranks(2)
def test_nothing_has_changed_after_a_check_or_an_error(rank, group):
    model, optimizer = trained_once(group)
    before = state_of(model, optimizer)
    assert zr.check_parallel(model, batch(), loss, optimizer=optimizer) == []
    assert_same(before, state_of(model, optimizer))
    for first_to_fail in (1, 4, 9):  # float64 fails first, and then the model's dtype
        with pytest.raises(ValueError, match="check_parallel: rank 1: KeyError"):
            zr.check_parallel(model, batch(), failing_from(first_to_fail))
        assert_same(before, state_of(model, optimizer))


@on_ranks(2)
def test_a_rank_that_fails_within_a_forward_is_waited_for_by_nobody_and_no_scalar_is_refused(rank, group):
    model = split(whole(), group)
    with pytest.raises(ValueError, match=r"loss\(model, batch\) must return a scalar"):
        zr.check_parallel(model, batch(), lambda model, given: model(given[0]))
    if rank == 1:

        def forward(x):
            raise RuntimeError("no more")

        model.blocks[1].norm2.forward = forward
    with pytest.raises(ValueError, match="check_parallel: rank 1: RuntimeError: no more"):
        zr.check_parallel(model, batch(), loss)


@pytest.mark.slow
@on_ranks(2)
def test_what_has_no_float64_is_checked_in_the_models_dtype(rank, group):
    """A sound model, and a sum that is counted twice."""

    model = split(whole(), group).float()
    kind = type(model.norm)

    def forward(self, x):
        if x.dtype is not torch.float32:
            raise TypeError("float32 only")
        return kind.forward(self, x)

    change(model.norm, forward=forward)
    assert zr.check_parallel(model, batch(), loss) == []
    model.blocks[0].mlp.down.register_forward_hook(lambda module, args, y: 2.0 * y)
    assert [one.cause for one in zr.check_parallel(model, batch(), loss)] == ["sum is counted wrongly"]


@on_ranks(2)
def test_a_reducer_of_data_parallelism_does_not_run(rank, group):
    def _done(bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    alone = [dist.new_group([one]) for one in range(2)][rank]
    model = DistributedDataParallel(split(whole(), group), process_group=alone)
    runs = []
    model.register_comm_hook(None, lambda state, bucket: runs.append(bucket) or _done(bucket))
    loss(model, batch()).backward()
    num_runs = len(runs)
    assert zr.check_parallel(model, batch(), loss) == []
    assert len(runs) == num_runs > 0
    loss(model, batch()).backward()
    assert len(runs) > num_runs
