"""A move during backward that cannot be made leaves every rank that lives as it was, and tells all of them why."""

import os
import signal
import threading
import time
import weakref

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.pipelines import Limited, assert_same, batch, held, pipeline_of
from helpers.processes import told_by_survivors
from torch import nn

from zeroresize.comm.words import WAIT_S
from zeroresize.pipeline import move_layers, moving_during_backward, moving_layers
from zeroresize.pipeline.layer_contents import TensorNote
from zeroresize.pipeline.layer_move import FinishedLayers
from zeroresize.resharding.agreement import NotEnoughMemoryError

THERE = {2: (0, 6, 7), 3: (0, 3, 6, 7)}


class Training(Limited):
    def step(self):
        words, target = batch(2)
        self.pipeline.step(words, target=target)

    def kept(self):
        """What only the optimizer's step changes."""
        parameters = dict(self.pipeline.named_parameters())
        return {
            name: tensor
            for name, tensor in held(self.pipeline, self.optimizer).items()
            if name in parameters or (" " in name and not name.endswith("gradient"))
        }

    def moves(self, boundaries=None, **options):
        options = {"optimizer": self.optimizer, "max_bytes": 2000} | options
        with moving_during_backward(self.pipeline, boundaries or THERE[self.group.size()], **options) as move:
            self.step()
        self.optimizer.step()
        return move.report.num_layers


def test_a_rank_that_dies_at_its_last_layer_leaves_the_others_as_they_were(tmp_path):
    def check(rank, group):
        training = Training(group)
        if rank == 1:  # it sends to one and receives from the other
            FinishedLayers.wait = lambda *_: os._exit(0)
            training.moves()
            return "did not die"
        with training.fails() as texts:
            training.moves()
        return texts[0]

    texts = told_by_survivors(check, 3, tmp_path)
    assert sorted(texts) == [0, 2], texts
    assert all(text.startswith("RuntimeError: ") for text in texts.values()), texts


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_rank_that_stops_in_the_block_is_waited_for_once(tmp_path, stopped):
    """Not for the step, then for what travels beside it, and then once more for what came of it."""

    def check(rank, group):
        training = Training(group)
        with (
            training.fails(within_s=1.6 * training.limit_s + WAIT_S) as texts,
            moving_during_backward(training.pipeline, THERE[3], optimizer=training.optimizer),
        ):
            if rank == stopped:
                time.sleep(0.5)  # until weights and optimizer state have travelled
                os.kill(os.getpid(), signal.SIGSTOP)
            training.step()
        return texts[0]

    texts = told_by_survivors(check, 3, tmp_path, stopped=[stopped])
    assert sorted(texts) == sorted({0, 1, 2} - {stopped}), texts
    assert all(text.startswith("RuntimeError: ") for text in texts.values()), texts


@pytest.mark.parametrize("kind", [ArithmeticError, KeyboardInterrupt])
@on_ranks(2)
def test_a_step_that_fails_or_is_interrupted_moves_nothing_and_says_why(rank, group, *, kind):
    training = Training(group)
    with training.fails(kind), moving_during_backward(training.pipeline, (0, 6, 7), optimizer=training.optimizer):
        training.step()
        raise kind
    with (
        training.fails(kind if rank == 0 else RuntimeError) as texts,
        moving_during_backward(training.pipeline, (0, 6, 7), optimizer=training.optimizer),
    ):
        training.step()
        if rank == 0:
            raise kind
    assert rank == 0 or "ranks [0] of the group have not received everything" in texts[0]
    assert training.moves() == 3


@on_ranks(2)
def test_bad_input_is_told_before_the_block(rank, group):
    training = Training(group)
    with (
        training.fails(ValueError if rank == 1 else RuntimeError) as texts,
        moving_during_backward(training.pipeline, (0, 6, 7), optimizer=training.optimizer, num_steps=1 - rank),
    ):
        raise AssertionError("the block must not begin")
    assert ("num_steps=0 is not allowed" if rank else "ranks [1]") in texts[0]
    assert training.moves() == 3


def test_what_cannot_travel_is_found_at_the_end(run_ranks):
    """A sparse gradient, which nobody knew of before backward."""

    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 4, sparse=True)

        def forward(self, x):
            return x + self.table(torch.tensor(1))

    def check(rank, group):
        layers = [nn.Linear(4, 4), Adding(), nn.Linear(4, 4)]
        pipeline = pipeline_of(group, (0, 2, 3), layers=layers, loss=nn.functional.mse_loss)
        x = torch.ones(8, 4)
        with (
            pytest.raises((ValueError, RuntimeError)) as caught,
            moving_during_backward(pipeline, (0, 1, 3), optimizer=None),
        ):
            pipeline.step(x, target=x)
        assert pipeline.boundaries == (0, 2, 3)
        return str(caught.value)

    first, second = run_ranks(check, 2)
    assert "layers.1.table.weight: a gradient of layout torch.sparse_coo cannot move" in first
    assert "ranks [0] of the group have not received everything" in second


@pytest.mark.parametrize("which", ["of the store", "of the move"])
def test_a_rank_without_memory_for_threads_says_so_and_all_hear_of_it_at_once(run_ranks, monkeypatch, which):
    def check(rank, group):
        training = Training(group)
        real, begin = threading.Thread.start, time.perf_counter()
        allowed = {"of the store": 0, "of the move": 10**6}[which]

        def start(thread):
            nonlocal allowed
            allowed -= 1
            if allowed < 0 or thread.name == "zeroresize move":
                raise RuntimeError("can't start new thread")
            real(thread)

        if rank == 1:
            monkeypatch.setattr(threading.Thread, "start", start)
        with (
            training.fails(NotEnoughMemoryError) as texts,
            moving_during_backward(training.pipeline, (0, 6, 7), optimizer=training.optimizer),
        ):
            raise AssertionError("the block must not begin")
        monkeypatch.undo()
        assert time.perf_counter() - begin < 4.0  # others wait for five seconds
        assert training.moves() == 3
        return texts[0]

    first, second = run_ranks(check, 2)
    assert (
        "preparing an early move of layers to boundaries [0, 6, 7]: " in second and "can't start new thread" in second
    )
    assert "the job's store cannot be reached" not in first + second
    assert "ranks [1] of the group" in first


@on_ranks(2)
def test_an_optimizer_that_steps_in_the_block_has_all_sent_again(rank, group):
    results = []
    words, target = batch(0)
    for is_early in (True, False):
        pipeline = pipeline_of(group)
        optimizer = torch.optim.AdamW(pipeline.parameters())

        def train(pipeline=pipeline, optimizer=optimizer):
            pipeline.step(words, target=target)
            optimizer.step()  # the first one makes state where there was none
            pipeline.step(words, target=target)

        if is_early:
            with moving_during_backward(pipeline, (0, 6, 7), optimizer=optimizer, num_steps=2) as move:
                train()
            assert move.was_repeated
        else:
            train()
            move_layers(pipeline, (0, 6, 7), optimizer=optimizer)
        assert pipeline.boundaries == (0, 6, 7)
        results.append(held(pipeline, optimizer))
    assert_same(*results)


def test_a_move_that_is_repeated_has_let_go_of_its_first_tensors(run_ranks, monkeypatch):
    def check(rank, group):
        training, first, alive = Training(group), [], []
        real_new, real_move = TensorNote.new, moving_layers.move_layers

        def new(note, device):
            tensor = real_new(note, device)
            first.append(weakref.ref(tensor))
            return tensor

        def again(*arguments, **options):
            alive.extend(one for one in first if one() is not None)
            monkeypatch.undo()
            return real_move(*arguments, **options)

        monkeypatch.setattr(TensorNote, "new", new)
        monkeypatch.setattr(moving_layers, "move_layers", again)
        with moving_during_backward(training.pipeline, (0, 6, 7), optimizer=training.optimizer) as move:
            training.step()
            training.step()  # of which it was told nothing
        assert move.was_repeated and training.pipeline.boundaries == (0, 6, 7)
        return len(first), len(alive)

    (num_received, num_alive), others = run_ranks(check, 2)
    assert num_received > 0 and num_alive == 0 and others == (0, 0)
