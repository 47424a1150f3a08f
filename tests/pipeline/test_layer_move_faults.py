"""A move of layers that cannot be made leaves every rank that lives with what it had, and tells all of them why."""

import re
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.pipelines import Limited, pipeline_of
from helpers.processes import for_each, memory_of_at_most
from torch import nn

from zeroresize.pipeline import move_layers, moving_during_backward
from zeroresize.resharding.agreement import NotEnoughMemoryError


@pytest.mark.parametrize("megabytes", [0.5, *(pytest.param(one, marks=pytest.mark.slow) for one in (2, 8, 40))])
@pytest.mark.parametrize("is_early", [False, True])
def test_wherever_memory_runs_out_all_are_told_at_once_that_it_was_that(run_ranks, megabytes, is_early):
    """In telling each other what moves, in making threads and connections, and in the new tensors."""

    def check(rank, group):
        sizes = [(1000, 8000), (8000, 1000), *([(1000, 2), (2, 1000)] * 100)]
        with torch.device("meta"):
            layers = [nn.Sequential(*(nn.Linear(*one) for one in sizes)).to_empty(device="cpu") for _ in range(4)]
        own_group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
        pipeline = pipeline_of(own_group, (0, 3, 4), layers=layers, loss=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        begin = time.perf_counter()
        with memory_of_at_most(int(megabytes * 2**20) if rank == 1 else 2**40), pytest.raises(RuntimeError) as caught:
            if is_early:
                with moving_during_backward(pipeline, (0, 1, 4), optimizer=optimizer):
                    raise AssertionError("the block must not begin")
            move_layers(pipeline, (0, 1, 4), optimizer=optimizer)
        assert time.perf_counter() - begin < 4.0  # others wait for five seconds
        assert pipeline.boundaries == (0, 3, 4)
        return type(caught.value), str(caught.value)

    (first_kind, first), (kind, text) = run_ranks(check, 2)
    assert first_kind is kind is NotEnoughMemoryError
    assert first == text and re.match(
        r"nothing has moved or changed: ranks \[1\] of the group failed while preparing .*: .*memory", text
    ), (first, text)


def with_another_group(training):
    if training.pipeline.stage == 0:
        first, second = training.optimizer.param_groups
        second["params"].append(first["params"].pop(3))


def for_this_stage_only(training):
    stage_optimizer = torch.optim.AdamW(one for one in training.pipeline.parameters() if one.numel())
    stage_optimizer.state.update(training.optimizer.state)
    training.optimizer = stage_optimizer


def wrapped_by_ddp(training):
    if training.pipeline.stage == 0:
        block, alone = training.pipeline.layers[1], dist.new_group([0], use_local_synchronization=True)
        block.up = nn.parallel.DistributedDataParallel(block.up, process_group=alone)


def stepped_by_zero(training):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    parameters = training.pipeline.parameters()
    training.optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, process_group=training.group, lr=0.1)


def stepped_by_a_wrapper(training):
    training.optimizer = type("Mixed", (), {"optim": training.optimizer, "state": training.optimizer.state})()


def with_state_that_cannot_travel(training):
    training.optimizer.state[training.pipeline.layers[3].weight]["history"] = [1, 2]


REFUSED = [
    ("is in parameter group 0 of the optimizer where it comes from, and in 1 here", with_another_group, {}),
    ("those of other stages of a pipeline included", for_this_stage_only, {}),
    ("layers.1.up is inside DistributedDataParallel, which keeps buckets or shards", wrapped_by_ddp, {}),
    ("layers cannot move: the optimizer is a ZeroRedundancyOptimizer, whose replicas keep", stepped_by_zero, {}),
    ("Mixed is no torch.optim.Optimizer: layers cannot move with wrappers", stepped_by_a_wrapper, {}),
    ("layers.3.weight: its optimizer keeps 'history' as a list", with_state_that_cannot_travel, {}),
    ("max_bytes=1 is too small: it must be at least 2", lambda training: None, {"max_bytes": 1}),
]


def test_what_cannot_move_is_refused_with_the_reason(run_ranks):
    @for_each(REFUSED)
    def check(rank, group, expected, change, options):
        training = Limited(group)
        change(training)
        with training.fails(ValueError, RuntimeError) as texts:
            move_layers(training.pipeline, (0, 6, 7), **{"optimizer": training.optimizer} | options)
        return texts[0]

    for (expected, *_), texts in zip(REFUSED, zip(*run_ranks(check, 2), strict=True), strict=True):
        assert any(expected in text for text in texts), texts
