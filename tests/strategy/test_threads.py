"""Two threads that switch strategies at once get an error that says so, on all ranks, and the model can go on."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.on_ranks import on_ranks
from helpers.strategies import assert_holds, switchable

from lm_examples.llama import LlamaConfig, llama_layers, token_loss
from zeroresize.plan.strategy import LengthRange, Strategy
from zeroresize.strategy import StrategyTrainer, SwitchableModel

BEFORE, FIRST, SECOND = Strategy(2), Strategy(1, 2), Strategy(1, 1, 2)
UNEVEN = Strategy(1, 2, shares=(3, 1))


class TwoThreads:
    """Two threads that make calls of a model at once: the first to make one waits in it until the other has come."""

    def __init__(self, model):
        self._model, self._are_running = model, False
        object.__setattr__(model._job, "meet", self.waiting(model._job.meet))

    def waiting(self, meet):
        """A meeting of ranks for which a thread waits until the other has come, too."""

        def wait_and_meet(*numbers):
            deadline = time.monotonic() + 3
            while self._are_running and not self._model.one_thread._num_late and time.monotonic() < deadline:
                time.sleep(0.001)
            return meet(*numbers)

        return wait_and_meet

    def errors_of(self, calls):
        """The errors of two calls that are made at once."""
        errors = []

        def run(call):
            try:
                call()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
            self._are_running = False

        self._are_running = True
        threads = [threading.Thread(target=run, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors


CALLS = {
    "alike": lambda model: [lambda: model.switch_to(FIRST)] * 2,
    "to different ones": lambda model: [lambda: model.switch_to(FIRST), lambda: model.switch_to(SECOND)],
    "of different kinds": lambda model: [lambda: model.prefetch(FIRST), lambda: model.switch_to(SECOND)],
    "a collection": lambda model: [model.collect, lambda: model.switch_to(SECOND)],
    "a further one": lambda model: [lambda: model.add(UNEVEN), lambda: model.switch_to(SECOND)],
    "an end": lambda model: [model.abandon, lambda: model.switch_to(SECOND)],
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_threads_that_switch_at_once_are_named_and_the_step_can_be_given_up(rank, group, *, name):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    model, wholes = switchable(group, [BEFORE, FIRST, SECOND])
    threads = TwoThreads(model)
    for _ in range(3):
        errors = threads.errors_of(CALLS[name](model))
        assert errors and all(
            "two threads called a SwitchableModel, or its trainer, at once" in text for text in errors
        ), errors
        model.abandon()
        assert model.current == BEFORE
        assert_holds(model, wholes)
    model.switch_to(SECOND)
    model.collect()
    assert_holds(model, wholes)


@on_ranks(2)
def test_threads_that_make_steps_of_a_trainer_at_once_are_named_and_training_goes_on(rank, group):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    config = LlamaConfig(num_blocks=1, hidden_size=8, num_heads=2, mlp_size=4, vocabulary=16)
    model = SwitchableModel(llama_layers(config), strategies=[BEFORE, FIRST], process_group=group)
    ranges = [LengthRange(4, BEFORE), LengthRange(8, FIRST)]
    trainer = StrategyTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), ranges, loss=token_loss)
    rows = [torch.arange(length) for length in (4, 8)]
    threads = TwoThreads(model)
    trainer._meet = threads.waiting(trainer._meet)
    for other in (lambda: trainer.step(rows), lambda: model.switch_to(FIRST), lambda: trainer.evaluate(rows)):
        errors = threads.errors_of([lambda: trainer.step(rows), other])
        assert errors and all("at once: one thread of each rank" in text for text in errors), errors
        model.abandon()
        trainer.step(rows)
