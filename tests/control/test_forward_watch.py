"""Which layers meet the other ranks over the size of a batch, and when a forgotten step is warned of."""

import logging
from types import SimpleNamespace

import torch
from torch import nn

from zeroresize.comm.words import Whereabouts
from zeroresize.control.forward_watch import ForwardWatch
from zeroresize.control.observer import FEW_CALLS, OptimizerSteps


class Alone:
    """An exchange in which the other rank always has what this one has; keeps who met."""

    def __init__(self):
        self.where = Whereabouts()
        self.words = SimpleNamespace(moved=lambda: None, raise_met=lambda: None)
        self.met = []

    def meet(self, *numbers):
        self.met.append(numbers)
        return [list(numbers), list(numbers)]


def test_one_layer_meets_for_all_that_change_alike_in_a_forward():
    """Of two towers the second one's batches may differ between ranks whatever the first has had before."""
    exchange = Alone()
    watched = ForwardWatch({"a": SimpleNamespace(), "b": SimpleNamespace()}, exchange, compares=True)
    for of_a, of_b in ((10, 10), (10, 10), (20, 20), (10, 10), (10, 20)):
        watched.forward("a", of_a)
        watched.forward("b", of_b)
    assert exchange.met == [(10, 0), (20, 0), (10, 0), (20, 1)]


def test_steps_without_a_call_are_warned_of_once(caplog):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    steps = OptimizerSteps(optimizer, Whereabouts(), {})
    for num_steps, num_warnings in ((FEW_CALLS - 1, 0), (FEW_CALLS - 1, 0), (3 * FEW_CALLS, 1)):
        for _ in range(num_steps):
            optimizer.step()
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * num_warnings
        steps.step_is_called()
