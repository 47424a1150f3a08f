"""A move of layers that cannot be made leaves every rank that lives with what it had, and tells all of them why."""

import re
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import pipelines
from helpers.pipelines import assert_same, groups_of, held, pipeline_of
from helpers.processes import memory_of_at_most
from torch import nn

from zeroresize.pipeline import move_layers, moving_during_backward
from zeroresize.resharding.agreement import NotEnoughMemoryError

THERE = {2: (0, 6, 7), 3: (0, 1, 6, 7)}


class Training:
    """A pipeline that has made a step, in a group that waits for seconds only."""

    def __init__(self, group, **options):
        self.group = dist.new_group(list(range(group.size())), timeout=timedelta(seconds=5))
        self.pipeline = pipeline_of(self.group, **options)
        self.optimizer = torch.optim.AdamW(groups_of(self.pipeline.named_parameters()))
        pipelines.train_step(self.pipeline, self.optimizer, 0)
        self.before = held(self.pipeline, self.optimizer)
        self.boundaries = self.pipeline.boundaries

    def move(self, boundaries=None, **options):
        options = {"optimizer": self.optimizer, **options}
        return move_layers(self.pipeline, boundaries or THERE[self.group.size()], **options)

    def fails(self, boundaries=None, kind=RuntimeError, **options):
        """The text of the error that a move ends with; nothing has changed then."""
        begin = time.perf_counter()
        with pytest.raises(kind) as caught:
            self.move(boundaries, **options)
        assert time.perf_counter() - begin < 20.0
        assert self.pipeline.boundaries == self.boundaries
        assert_same(held(self.pipeline, self.optimizer), self.before)
        return f"{type(caught.value).__name__}: {caught.value}"

    def moves(self):
        """Afterwards a move is possible, and training goes on."""
        assert self.move().num_layers
        pipelines.train_step(self.pipeline, self.optimizer, 1)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ((0, 0, 6, 7), "every stage has at least one layer"),
        ((0, 1, 7), "must be 4 rising whole numbers from 0 to 7"),
    ],
)
def test_boundaries_that_do_not_fit_are_told_to_all(run_ranks, wrong, expected):
    def check(rank, group):
        training = Training(group)
        text = training.fails(wrong if rank == 2 else None, (ValueError, RuntimeError))
        assert (expected if rank == 2 else "ranks [2] of the group failed before") in text
        training.moves()

    run_ranks(check, 3)


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
    assert first.startswith("nothing has moved or changed") and text.startswith("nothing has moved or changed")
    assert "to boundaries [0, 1, 4]: out of memory" in text or re.search(
        r"not enough memory for [a-z ]+: .*rank 1 lacks [\d.]+ MB, of [\d.]+ MB that it needs: .*memory", text
    ), text


def test_optimizers_with_other_settings_or_groups_do_not_get_layers(run_ranks):
    def check(rank, group):
        training = Training(group)
        training.optimizer.param_groups[1]["lr"] *= 1 + rank
        assert "differ in the settings of the optimizer's parameter groups" in training.fails()
        training.optimizer.param_groups[1]["lr"] /= 1 + rank
        first, second = training.optimizer.param_groups
        if rank == 0:
            second["params"].append(first["params"].pop(3))
        text = training.fails(kind=(ValueError, RuntimeError))
        if rank == 0:
            first["params"].insert(3, second["params"].pop())
            assert "is in parameter group 0 of the optimizer where it comes from, and in 1 here" in text
        training.moves()

    run_ranks(check, 2)


def test_an_optimizer_that_was_given_this_stage_only_is_an_error(run_ranks):
    def check(rank, group):
        training = Training(group)
        stage_optimizer = torch.optim.AdamW(one for one in training.pipeline.parameters() if one.numel())
        stage_optimizer.state.update(training.optimizer.state)
        training.optimizer = stage_optimizer
        return training.fails(kind=(ValueError, RuntimeError))

    for text in run_ranks(check, 2):
        assert "the optimizer does not step" in text and "those of other stages of a pipeline included" in text


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


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (wrapped_by_ddp, "layers.1.up is inside DistributedDataParallel, which keeps buckets or shards"),
        (stepped_by_zero, "cannot move with ZeroRedundancyOptimizer: other ranks hold shards"),
        (stepped_by_a_wrapper, "Mixed is no torch.optim.Optimizer: layers cannot move with wrappers"),
        (with_state_that_cannot_travel, "layers.3.weight: its optimizer keeps 'history' as a list"),
    ],
)
def test_what_cannot_move_is_refused_with_the_reason(run_ranks, change, expected):
    def check(rank, group):
        training = Training(group)
        change(training)
        training.before = held(training.pipeline, training.optimizer)
        return training.fails(kind=(ValueError, RuntimeError))

    texts = run_ranks(check, 2)
    assert any(expected in text for text in texts), texts


def test_a_sparse_gradient_does_not_move(run_ranks):
    def check(rank, group):
        pipeline = pipeline_of(group, (0, 2, 3), layers=[nn.ReLU(), nn.Embedding(5, 3, sparse=True), nn.ReLU()])
        if rank == 0:
            pipeline.layers[1](torch.tensor([1])).sum().backward()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            move_layers(pipeline, (0, 1, 3), optimizer=None)
        return str(caught.value)

    first, second = run_ranks(check, 2)
    assert first == "layers.1.weight: a gradient of layout torch.sparse_coo cannot move"
    assert "ranks [0] of the group failed before" in second


def test_room_for_less_than_two_messages_is_an_error(run_ranks):
    def check(rank, group):
        with pytest.raises(ValueError, match="max_bytes=1 is too small: it must be at least 2"):
            move_layers(pipeline_of(group), (0, 7), optimizer=None, max_bytes=1)

    run_ranks(check, 1)
