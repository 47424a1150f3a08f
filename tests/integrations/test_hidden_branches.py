"""Forwards that compute something else under other circumstances, or the next time, are not proven by one look."""

import array
import collections
import cProfile
import dataclasses
import gc
import itertools
import random
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.processes import in_first_rank
from helpers.segments import convert_and_find
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroresize as zr
from zeroresize import ColumnParallelLinear, RowParallelLinear

OFF = zr.BalanceConfig(mode="off")
WIDTH, INNER = 8, 12
CALLS = [0]
KEPT = []
NUMBER = 0


class State:
    """Something that a user's modules share."""

    def __init__(self):
        self.calls = 0


class Stats:
    calls = 0


@dataclasses.dataclass
class Slots:
    __slots__ = ("calls",)
    calls: int


SHARED = State()


def module(forward, group, **parts):
    """``forward(self, x)`` between a column- and a row-parallel layer, a and b."""

    class Module(nn.Module):
        calls_of_class = 0

    Module.forward = forward
    made = Module()
    made.a = ColumnParallelLinear(WIDTH, INNER, process_group=group)
    made.b = RowParallelLinear(INNER, WIDTH, process_group=group)
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def softmax_if(question):
    """Mixes units where ``question(self, h)`` says so."""

    def forward(self, x):
        h = self.a(x)
        return self.b(h.softmax(-1) if question(self, h) else h.relu())

    return forward


def relu_if(question):
    """The other way round: what is seen first may be any of the two."""
    return softmax_if(lambda self, h: not question(self, h))


def counts(self, h):
    self.calls += 1
    return self.calls > 1000


def counts_in_a_list(self, h):
    self.calls[0] += 1
    return self.calls[0] > 1000


def counts_globally(self, h):
    CALLS[0] += 1
    return CALLS[0] > 1000


def counts_in_an_object(self, h):
    SHARED.calls += 1
    return SHARED.calls > 1000


def counts_in_the_class(self, h):
    type(self).calls_of_class += 1
    return self.calls_of_class > 1000


def counts_by_name(self, h):
    global NUMBER
    NUMBER += 1
    return NUMBER > 1000


def closure():
    number = 0

    def counts_outside(self, h):
        nonlocal number
        number += 1
        return number > 1000

    return counts_outside


def counts_in_another_class(self, h):
    Stats.calls += 1
    return Stats.calls > 1000


def counts_in_an_attribute(self, h):
    self.kept.calls += 1
    return self.kept.calls > 1000


def counts_unseen_by_torch(self, h):
    self.calls.detach().numpy()[...] += 1
    return self.calls.item() > 1000


def keeps(place):
    def keep(self, h):
        place(self).append(h)
        return False

    return keep


def keeps_by_name(self, h):
    self.kept["h"] = h
    return False


def by_pattern(self, h):
    match h:
        case torch.Tensor():
            return True
    return False


def asks_optional(question):
    """Mixes units where ``question(mode)`` says so of an argument that is optional."""

    def forward(self, x, mode=None):
        h = self.a(x)
        return self.b(h.softmax(-1) if question(mode) else h.relu())

    return forward


def is_mixing(self, x, mix=False):
    h = self.a(x)
    return self.b(h.softmax(-1) if mix is True else h.relu())


def is_not_told(self, x, mix=True):
    h = self.a(x)
    return self.b(h.softmax(-1) if mix is None or mix is False else h.relu())


def reads_a_weight(self, x):
    gate = F.linear(x, self.a.weight).softmax(-1).sum(-1, keepdim=True)
    return self.b(self.a(x).relu()) * gate


def scales_a_weight(self, x):
    with torch.no_grad():
        self.b.weight.div_(self.b.weight.norm(dim=1, keepdim=True))
    return self.b(self.a(x).relu())


def sets_a_weight(self, x):
    self.b.weight.data = F.normalize(self.b.weight.data, dim=1)
    return self.b(self.a(x).relu())


def sets_data(self, x):
    h = self.a(x).relu()
    h.data = h.data.softmax(-1)
    return self.b(h)


NOT_PROVEN = {
    "a type": (softmax_if(lambda self, h: type(h) is torch.Tensor), {}, "compares types (in <lambda>, "),
    "an equal type": (softmax_if(lambda self, h: type(h) == torch.Tensor), {}, "it compares types"),  # noqa: E721
    "a pattern": (softmax_if(by_pattern), {}, "it matches patterns (in by_pattern, "),
    "an object": (softmax_if(lambda self, h: h is SHARED), {}, "it compares objects by `is`"),
    "inference": (softmax_if(lambda self, h: torch.is_inference_mode_enabled()), {}, "is_inference_mode_enabled()"),
    "compiling": (softmax_if(lambda self, h: torch.compiler.is_compiling()), {}, "it asks is_compiling()"),
    "a graph": (softmax_if(lambda self, h: h.grad_fn is None), {}, "it asks for grad_fn of a tensor"),
    "a string": (asks_optional(lambda mode: isinstance(mode, str)), {}, "what kind of object its argument mode is"),
    "a flag": (is_mixing, {}, "softmax()"),
    "a flag that is not given": (is_not_told, {}, "softmax()"),
    "a weight": (reads_a_weight, {}, "the forward uses a.weight itself"),
    "a weight's norm": (lambda self, x: (self.b(self.a(x)), self.a.weight.norm()), {}, "uses a.weight itself"),
    "a bias": (lambda self, x: self.b(self.a(x)) + self.a.bias.sum(), {}, "the forward uses a.bias itself"),
    "a weight in place": (scales_a_weight, {}, "the forward uses b.weight itself"),
    "a weight's data": (sets_a_weight, {}, "it sets data of a tensor"),
    "data": (sets_data, {}, "it sets data of a tensor (in sets_data, "),
    "a shape": (softmax_if(lambda self, h: h.shape[-1] > 8), {}, "TraceError: symbolically traced variables"),
    "where it asks": (softmax_if(lambda self, h: h.shape[-1] > 8), {}, "test_hidden_branches.py:"),
    "without gradients": (softmax_if(lambda self, h: not torch.is_grad_enabled()), {}, "softmax()"),
    "with gradients": (softmax_if(lambda self, h: torch.is_grad_enabled()), {}, "softmax()"),
    "a tensor": (softmax_if(lambda self, h: isinstance(h, torch.Tensor)), {}, "softmax()"),
    "is_tensor": (softmax_if(lambda self, h: torch.is_tensor(h)), {}, "softmax()"),
    "no attribute": (softmax_if(lambda self, h: not hasattr(h, "quantized")), {}, "softmax()"),
    "autocast on the CPU": (softmax_if(lambda self, h: torch.is_autocast_enabled("cpu")), {}, "softmax()"),
    "autocast on a GPU": (softmax_if(lambda self, h: torch.is_autocast_enabled("cuda")), {}, "softmax()"),
    "a counter": (softmax_if(counts), {"calls": 0}, "keeps something from call to call: Module.calls"),
    "a counter in a list": (softmax_if(counts_in_a_list), {"calls": [0]}, "Module.calls"),
    "a counter of the file": (softmax_if(counts_globally), {}, "CALLS"),
    "a counter in an object": (softmax_if(counts_in_an_object), {}, "SHARED.calls"),
    "a counter of the class": (softmax_if(counts_in_the_class), {}, "Module.calls_of_class"),
    "a counter by name": (softmax_if(counts_by_name), {}, "NUMBER"),
    "a counter of an outer function": (softmax_if(closure()), {}, "number"),
    "an iterator": (
        softmax_if(lambda self, h: next(self.calls) > 1000),
        {"calls": itertools.count()},
        "Module.calls",
    ),
    "a tensor that counts": (
        softmax_if(lambda self, h: self.calls.add_(1).item() > 1000),
        {"calls": torch.zeros(())},
        "Module.calls",
    ),
    "a counter of another class": (softmax_if(counts_in_another_class), {}, "Stats.calls"),
    "a counter in a slot": (softmax_if(counts_in_an_attribute), {"kept": Slots(0)}, "Module.kept.calls"),
    "a counter in a namespace": (
        softmax_if(counts_in_an_attribute),
        {"kept": types.SimpleNamespace(calls=0)},
        "Module.kept.calls",
    ),
    "an array of numpy": (softmax_if(counts_in_a_list), {"calls": np.zeros(1)}, "Module.calls"),
    "an array": (softmax_if(counts_in_a_list), {"calls": array.array("l", [0])}, "Module.calls"),
    "bytes": (
        softmax_if(keeps(lambda self: types.SimpleNamespace(append=lambda h: self.calls.append(1)))),
        {"calls": bytearray(1)},
        "Module.calls",
    ),
    "a tensor by numpy": (softmax_if(counts_unseen_by_torch), {"calls": torch.zeros(())}, "Module.calls"),
    "a list": (softmax_if(keeps(lambda self: self.kept)), {"kept": []}, "Module.kept"),
    "a deque": (
        softmax_if(keeps(lambda self: self.kept)),
        {"kept": collections.deque([0, 1], maxlen=2)},
        "Module.kept",
    ),
    "a list in a dictionary": (softmax_if(keeps(lambda self: self.kept["h"])), {"kept": {"h": []}}, "Module.kept"),
    "a dictionary": (softmax_if(keeps_by_name), {"kept": {}}, "Module.kept"),
    "a list of the file": (softmax_if(keeps(lambda self: KEPT)), {}, "KEPT"),
    "a coin": (softmax_if(lambda self, h: random.random() < 0.5), {}, "its forward draws random numbers"),
    "a coin of torch": (softmax_if(lambda self, h: torch.rand(()).item() < 0.5), {}, "draws random numbers"),
    "a coin of numpy": (softmax_if(lambda self, h: np.random.rand() < 0.5), {}, "draws random numbers"),
    "a coin of its own": (
        softmax_if(lambda self, h: self.coin.random() < 0.001),
        {"coin": random.Random(0)},
        "Module.coin",
    ),
    "a generator of its own": (
        softmax_if(lambda self, h: self.coin.random() < 0.001),
        {"coin": np.random.default_rng(0)},
        "Module.coin",
    ),
}


@pytest.mark.parametrize("kind", NOT_PROVEN)
def test_what_is_not_the_same_every_time_stays_even(run_ranks, kind):
    forward, parts, reason = NOT_PROVEN[kind]

    def check(rank, group):
        model = module(forward, group, **parts)
        before = {name: repr(one) for name, one in vars(model).items() if name in parts and name != "coin"}
        states = random.getstate(), torch.get_rng_state(), CALLS[0], SHARED.calls, len(KEPT), Stats.calls
        segments, reasons = convert_and_find(model, group)
        assert segments == [] and reason in reasons["b"], reasons
        if kind != "an iterator":
            assert {name: repr(one) for name, one in vars(model).items() if name in before} == before
        assert states[0] == random.getstate() and torch.equal(states[1], torch.get_rng_state())
        assert states[2:] == (CALLS[0], SHARED.calls, len(KEPT), Stats.calls)
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")

    run_ranks(in_first_rank(check), 2)


class Doubled(torch.autograd.Function):
    """Its backward could mix units."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


def test_an_autograd_function_shows_only_its_forward(run_ranks):
    def check(rank, group):
        segments, reasons = convert_and_find(module(lambda self, x: self.b(Doubled.apply(self.a(x))), group), group)
        assert segments == [] and "Doubled is an autograd function, whose backward is not seen" in reasons["b"]

    run_ranks(in_first_rank(check), 2)


def test_a_collection_of_garbage_is_not_the_forward_s(run_ranks):
    def count(phase, info):
        global NUMBER
        NUMBER += 1

    def check(rank, group):
        gc.set_threshold(1)
        gc.callbacks.append(count)
        segments, reasons = convert_and_find(module(softmax_if(lambda self, h: False), group), group)
        assert gc.isenabled() and [one.name for one in segments] == ["b"], reasons

    run_ranks(in_first_rank(check), 2)


@pytest.mark.parametrize("seed", range(4))
def test_a_first_look_at_softmax_is_not_forgotten(run_ranks, seed):
    """Whatever the coin shows."""

    def check(rank, group):
        random.seed(seed)
        segments, _ = convert_and_find(module(relu_if(lambda self, h: random.random() < 0.5), group), group)
        assert segments == []

    run_ranks(in_first_rank(check), 2)


def test_beside_a_profiler_of_python_state_is_seen_and_beside_another_nothing_moves(run_ranks):
    def check(rank, group):
        seen = []

        def watch(*event):
            seen.append(event)

        outcomes = []
        for forward in (softmax_if(counts_globally), softmax_if(lambda self, h: False)):
            model = module(forward, group)
            sys.setprofile(watch)
            segments, reasons = convert_and_find(model, group)
            assert sys.getprofile() is watch
            sys.setprofile(None)
            outcomes.append((len(segments), "CALLS" in str(reasons)))
        model = module(softmax_if(counts_globally), group)
        with cProfile.Profile():
            segments, reasons = convert_and_find(model, group)
        assert segments == [] and ("a profiler is active" in reasons["b"] or "CALLS" in reasons["b"])
        return outcomes, bool(seen)

    assert run_ranks(check, 2) == [([(0, True), (1, False)], True)] * 2


PROVEN = {
    "a tensor": (softmax_if(lambda self, h: not isinstance(h, torch.Tensor)), {}),
    "a flag that does not mix": (lambda self, x, twice=False: self.b(self.a(x)) * (2 if twice is True else 1), {}),
    "a mask that is not given": (lambda self, x, mask=None: self.b(self.a(x if mask is None else x * mask)), {}),
    "a weight's dtype": (lambda self, x: self.b(self.a(x).relu().to(self.b.weight.dtype)), {}),
    "a constant": (softmax_if(lambda self, h: self.mixes), {"mixes": False}),
    "a setting": (softmax_if(lambda self, h: self.settings["mixes"]), {"settings": {"mixes": False, "more": [1, 2.0]}}),
    "a number of the file": (softmax_if(lambda self, h: NUMBER > 1000), {}),
    "checkpointed": (lambda self, x: self.b(checkpoint(lambda x: self.a(x).relu(), x, use_reentrant=False)), {}),
    "an array": (softmax_if(lambda self, h: self.sizes[0] > 1), {"sizes": np.ones(1)}),
    "a dropout": (softmax_if(lambda self, h: False), {"drop": nn.Dropout(0.1)}),
}


@pytest.mark.parametrize("kind", PROVEN)
def test_what_is_always_the_same_moves(run_ranks, kind):
    forward, parts = PROVEN[kind]

    def check(rank, group):
        segments, reasons = convert_and_find(module(forward, group, **parts), group)
        assert [one.name for one in segments] == ["b"] and reasons == {}

    run_ranks(check, 2)
