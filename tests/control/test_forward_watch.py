"""Which layers meet the other ranks over the size of a batch, and when a forgotten step is warned of."""

import logging
from types import SimpleNamespace

import torch
from torch import nn

from zeroresize.comm.words import Whereabouts
from zeroresize.control import forward_watch
from zeroresize.control.forward_watch import FEW_STEPS, MANY_FORWARDS, ForwardWatch


class Alone:
    """An exchange in which the other rank always has what this one has; keeps who met."""

    def __init__(self):
        self.where = Whereabouts()
        self.words = SimpleNamespace(moved=lambda: None, raise_met=lambda: None)
        self.met = []

    def meet(self, *numbers):
        self.met.append(numbers)
        return [list(numbers), list(numbers)]


def watch(*names, compares=True):
    layers = {
        name: SimpleNamespace(weight=nn.Parameter(torch.zeros(2, 2)), is_column_parallel=False, watch_forward=None)
        for name in names
    }
    exchange = Alone()
    return ForwardWatch(layers, exchange, compares=compares), layers, exchange


def forwards(watched, **tokens):
    """One forward of the model: each layer with its T."""
    for name, num_tokens in tokens.items():
        watched.forward(name, num_tokens, True)


def test_one_layer_meets_for_all_that_change_alike_in_a_forward():
    watched, _, exchange = watch("a", "b", "c")
    forwards(watched, a=10, b=10, c=10)
    forwards(watched, a=10, b=10, c=10)
    forwards(watched, a=20, b=20, c=20)
    assert exchange.met == [(10, 0), (20, 0)]


def test_what_one_layer_met_for_in_an_earlier_forward_says_nothing_of_another_layer_now():
    """Two towers: the batches of the second one may differ between ranks whatever the first has had before."""
    watched, _, exchange = watch("a", "b")
    for num_tokens in (10, 20, 10):
        forwards(watched, a=num_tokens, b=num_tokens)
    before = len(exchange.met)
    forwards(watched, a=10, b=20)
    assert exchange.met[before:] == [(20, 1)]


def warnings_after(caplog, num_steps, num_micro_batches, is_new_in_every_forward=False):
    watched, layers, _ = watch("a")
    with caplog.at_level(logging.WARNING, logger="zeroresize"):
        for _ in range(num_steps):
            for _ in range(num_micro_batches):
                if is_new_in_every_forward:
                    layers["a"].weight.data = torch.zeros(2, 2)
                forwards(watched, a=10)
            with torch.no_grad():
                layers["a"].weight.add_(1.0)
    return len(caplog.records)


def test_steps_without_a_call_are_warned_of_once(caplog):
    assert warnings_after(caplog, 3 * FEW_STEPS, 1) == 1


def test_many_micro_batches_before_the_first_call_are_no_mistake(caplog):
    assert warnings_after(caplog, 1, MANY_FORWARDS // 2) == 0


def test_weights_that_are_made_anew_in_every_forward_tell_no_steps(caplog, monkeypatch):
    monkeypatch.setattr(forward_watch, "is_sharded_in", lambda layer, weight: True)
    assert warnings_after(caplog, 2, 2 * FEW_STEPS, is_new_in_every_forward=True) == 0


def test_where_weights_never_change_very_many_forwards_are_warned_of(caplog):
    watched, _, _ = watch("a")
    with caplog.at_level(logging.WARNING, logger="zeroresize"):
        for _ in range(MANY_FORWARDS):
            forwards(watched, a=10)
    assert len(caplog.records) == 1
