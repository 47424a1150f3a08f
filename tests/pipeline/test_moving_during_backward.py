"""Layers move while the pipeline computes, as if they had moved between two steps."""

import threading
import time

import pytest
import torch
from helpers import pipelines
from helpers.on_ranks import gathered, on_ranks
from helpers.pipelines import BOUNDARIES, OPTIMIZERS, assert_same, groups_of, half_the_loss, held, pipeline_of
from torch import nn

from zeroresize.pipeline import clip_grad_norm_, move_layers, moving_during_backward
from zeroresize.resharding.transport import Transport

pytestmark = pytest.mark.same_ranks

NUM_STEPS, MAX_NORM = 5, 0.5


class Training:
    """Steps of two batches each; before each of them it is told where layers are to move."""

    def __init__(self, group, name="AdamW", **options):
        self.pipeline = pipeline_of(group, loss=half_the_loss, count=torch.numel, **options)
        self.optimizer = OPTIMIZERS[name](groups_of(self.pipeline.named_parameters()))
        self.decay = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.losses, self.step = [], 0

    def accumulate(self):
        self.losses += pipelines.accumulate(self.pipeline, self.step)
        self.step += 1

    def update(self):
        clip_grad_norm_(self.pipeline, MAX_NORM)
        self.optimizer.step()
        self.decay.step()

    def move_between(self, boundaries):
        self.optimizer.zero_grad()
        self.accumulate()
        return move_layers(self.pipeline, boundaries, optimizer=self.optimizer)

    def move_during(self, boundaries, **options):
        self.optimizer.zero_grad()
        options = {"num_steps": 2, "optimizer": self.optimizer} | options
        with moving_during_backward(self.pipeline, boundaries, **options) as move:
            self.accumulate()
        assert self.pipeline.boundaries == boundaries
        return move


#: Boundaries of each step: layers move in the first one, when gradients and optimizer state are not there yet.
THERE_AND_BACK = [BOUNDARIES[3][number] for number in (1, 2, 0, 0, 1)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "schedule"), [(name, "gpipe" if name == "Adafactor" else "1f1b") for name in OPTIMIZERS]
)
@on_ranks(3)
def test_everything_is_as_after_a_move_between_two_steps(rank, group, *, name, schedule):
    between, during = (Training(group, name, schedule=schedule) for _ in range(2))
    for boundaries in THERE_AND_BACK:
        report, move = between.move_between(boundaries), during.move_during(boundaries, max_bytes=700)
        assert_same(held(between.pipeline, between.optimizer), held(during.pipeline, during.optimizer))
        assert not move.was_repeated
        assert move.report.num_layers == report.num_layers
        for key in ("sent_bytes", "received_bytes"):  # and which gradients there are
            assert 0 <= getattr(move.report, key) - getattr(report, key) < 100
        between.update()
        during.update()
        assert_same(held(between.pipeline, between.optimizer), held(during.pipeline, during.optimizer))
    assert gathered(group, during.losses)[2] == pytest.approx(
        pipelines.undivided(OPTIMIZERS[name], NUM_STEPS, MAX_NORM)[0], rel=1e-10, abs=0.0
    )


@pytest.mark.parametrize("num_steps", [1, 3])
def test_gradients_that_were_not_final_are_sent_again(run_ranks, num_steps):
    """Told of too few steps a layer is sent too early; of too many, at the end of the block."""

    def check(rank, group):
        between, during = Training(group), Training(group)
        results = []
        for boundaries in THERE_AND_BACK:
            between.move_between(boundaries)
            results.append(during.move_during(boundaries, num_steps=num_steps).was_repeated)
            assert_same(held(between.pipeline, between.optimizer), held(during.pipeline, during.optimizer))
            between.update()
            during.update()
        return results

    moves = [num_steps == 1] * 3
    assert run_ranks(check, 3) == [[*moves, False, moves[0]]] * 3


@on_ranks(2)
def test_what_else_a_block_changes_moves_too(rank, group):
    training = Training(group)
    boundaries = training.pipeline.boundaries
    with moving_during_backward(training.pipeline, (0, boundaries[1] + 1, 7), optimizer=None, num_steps=2) as move:
        training.accumulate()
        if rank == 1:
            time.sleep(0.5)  # until all has been sent
            training.pipeline.layers[boundaries[1]].eval()
    assert move.was_repeated and not training.pipeline.layers[boundaries[1]].training


@on_ranks(2)
def test_gradients_are_added_to_those_of_earlier_blocks(rank, group):
    between, during = Training(group), Training(group)
    for training in (between, during):
        training.accumulate()
    move_layers(between.pipeline, BOUNDARIES[2][1], optimizer=between.optimizer)
    between.accumulate()
    with moving_during_backward(during.pipeline, BOUNDARIES[2][1], optimizer=during.optimizer, num_steps=2) as move:
        during.accumulate()
    assert not move.was_repeated
    assert_same(held(between.pipeline, between.optimizer), held(during.pipeline, during.optimizer))


class _Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wait):
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.wait()
        return dy.clone(), None


class Waiting(nn.Module):
    """Its backward ends only when ``wait`` returns."""

    def __init__(self, wait):
        super().__init__()
        self.linear, self.wait = nn.Linear(4, 4), wait

    def forward(self, x):
        return _Waiting.apply(self.linear(x), self.wait)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@on_ranks(2)
def test_a_layer_is_sent_while_earlier_layers_of_its_stage_still_compute(rank, group, *, monkeypatch, schedule):
    is_sent, times = threading.Event(), []

    def wait():  # in the last backward of the first layer, when that of the second one is over
        times.append(1)
        assert len(times) < pipelines.MICRO or is_sent.wait(20.0)

    finish = Transport._finish

    def finished(transport, round_, *arguments):
        finish(transport, round_, *arguments)
        if any(transport._parcels[piece.parcel].turn for pieces in round_.values() for piece in pieces):
            is_sent.set()

    monkeypatch.setattr(Transport, "_finish", finished)
    layers = [Waiting(wait), *(nn.Linear(4, 4) for _ in range(5))]
    pipeline = pipeline_of(group, (0, 2, 6), layers=layers, loss=nn.functional.mse_loss, schedule=schedule)
    x = torch.ones(8, 4)
    with moving_during_backward(pipeline, (0, 1, 6), optimizer=None) as move:
        pipeline.step(x, target=x)
    assert not move.was_repeated and pipeline.boundaries == (0, 1, 6)
    assert gathered(group, len(times)) == [pipelines.MICRO, 0]


@on_ranks(2)
def test_extra_state_and_what_is_unused_or_frozen(rank, group):
    """Extra state that forward changes, gradients that are not there, and layers that backward does not reach."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.count = nn.Linear(4, 4), nn.Linear(2, 2), 0

        def forward(self, x):
            self.count += 1
            return self.used(x)

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    layers = [Counting() for _ in range(4)]
    for layer in layers[:3]:
        layer.requires_grad_(False)
    pipeline = pipeline_of(group, (0, 2, 4), layers=layers, loss=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    x = torch.ones(8, 4)
    pipeline.step(x, target=x)
    for step, boundaries in enumerate(((0, 3, 4), (0, 1, 4))):
        with moving_during_backward(pipeline, boundaries, optimizer=optimizer) as move:
            pipeline.step(x, target=x)
        assert not move.was_repeated
        num_forwards = pipelines.MICRO * (step + 2)
        assert [layers[number].count for number in pipeline.present] == [num_forwards] * len(pipeline.present)
        optimizer.step()
    assert gathered(group, [layers[number].used.weight.grad is None for number in pipeline.present]) == [
        [True],
        [True, True, False],
    ]
