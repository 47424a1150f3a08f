"""Forwards that compute something else under other circumstances are not proven by one look at them."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from helpers.on_ranks import on_ranks
from helpers.processes import in_first_rank
from helpers.segments import convert_and_find
from test_find_segments import Layers, odd
from torch import nn
from torch.utils.checkpoint import checkpoint


def softmax_if(question):
    """Mixes units where ``question(self, h)`` says so."""

    def forward(self, x):
        h = self.a(x)
        return self.b(h.softmax(-1) if question(self, h) else h.relu())

    return forward


def counts(self, h):
    self.calls += 1
    return self.calls > 1000


def counts_in_a_list(self, h):
    self.calls[0] += 1
    return self.calls[0] > 1000


def keeps(place):
    def keep(self, h):
        place(self).append(h)
        return False

    return keep


def is_mixing(self, x, mix=False):
    h = self.a(x)
    return self.b(h.softmax(-1) if mix is True else h.relu())


def reads_a_weight(self, x):
    gate = F.linear(x, self.a.weight).softmax(-1).sum(-1, keepdim=True)
    return self.b(self.a(x).relu()) * gate


def scales_a_weight(self, x):
    with torch.no_grad():
        self.b.weight.div_(self.b.weight.norm(dim=1, keepdim=True))
    return self.b(self.a(x).relu())


def sets_data(self, x):
    h = self.a(x).relu()
    h.data = h.data.softmax(-1)
    return self.b(h)


def sums_unseen(self, x):
    """As a kernel that is no function of torch."""
    h = self.a(x)
    with torch._C.DisableTorchFunction():
        total = h.sum()
    return self.b(h) * total


class MixesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.relu()

    @staticmethod
    def backward(ctx, dy):
        return dy - dy.mean(-1, keepdim=True)


BY_NUMBERS = "computed with numbers: MixesUnitsError: a unit has other numbers"
KEEPS = "its forward keeps something from call to call: Module."
#: A forward, further attributes of its module, and a part of the reason.
NOT_PROVEN = {
    "a type": (softmax_if(lambda self, h: type(h) is torch.Tensor), {}, "softmax()"),
    "a backward": (lambda self, x: self.b(MixesInBackward.apply(self.a(x))), {}, BY_NUMBERS),
    "a flag": (is_mixing, {}, "softmax()"),
    "a weight": (reads_a_weight, {}, "the forward uses a.weight itself"),
    "a weight in place": (scales_a_weight, {}, "the forward uses b.weight itself"),
    "data": (sets_data, {}, "also used by data()"),
    "a number": (lambda self, x: self.b(self.a(x)) * self.a(x).sum().item(), {}, "also used by sum()"),
    "a sum that nobody sees": (sums_unseen, {}, "something else than the row-parallel layer reads"),
    "a shape": (softmax_if(lambda self, h: h.shape[-1] > 8), {}, "TraceError: symbolically traced variables"),
    "without gradients": (softmax_if(lambda self, h: not torch.is_grad_enabled()), {}, "softmax()"),
    "a counter": (softmax_if(counts), {"calls": 0}, f"{KEEPS}calls"),
    "a counter in a list": (softmax_if(counts_in_a_list), {"calls": [0]}, f"{KEEPS}calls"),
    "a list": (softmax_if(keeps(lambda self: self.kept)), {"kept": []}, f"{KEEPS}kept"),
    "a coin": (softmax_if(lambda self, h: random.random() < 0.5), {}, "its forward draws random numbers"),
    "a coin of numpy": (softmax_if(lambda self, h: np.random.rand() < 0.5), {}, "draws random numbers"),
}


@on_ranks(2)
@in_first_rank
def test_what_may_compute_something_else_stays_even_with_the_reason(rank, group):
    for kind, (forward, parts, reason) in NOT_PROVEN.items():
        model = odd(forward, **parts)(Layers(group))
        before = {name: repr(getattr(model, name)) for name in parts}
        states = random.getstate(), torch.get_rng_state()
        segments, reasons = convert_and_find(model, group)
        assert segments == [] and reason in reasons["b"], (kind, reasons)
        assert {name: repr(getattr(model, name)) for name in parts} == before, kind
        assert states[0] == random.getstate() and torch.equal(states[1], torch.get_rng_state()), kind
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"), kind


PROVEN = {
    "a flag that does not mix": (lambda self, x, twice=False: self.b(self.a(x)) * (2 if twice is True else 1), {}),
    "a mask that is not given": (lambda self, x, mask=None: self.b(self.a(x if mask is None else x * mask)), {}),
    "a weight's dtype": (lambda self, x: self.b(self.a(x).relu().to(self.b.weight.dtype)), {}),
    "like the input": (lambda self, x: self.b(self.a(x).relu().type_as(x).to(x.device)), {}),
    "a type that does not matter": (softmax_if(lambda self, h: type(h) is str), {}),
    "a constant": (softmax_if(lambda self, h: self.mixes), {"mixes": False}),
    "a setting": (softmax_if(lambda self, h: self.settings["mixes"]), {"settings": {"mixes": False, "more": [1, 2.0]}}),
    "checkpointed": (lambda self, x: self.b(checkpoint(lambda x: self.a(x).relu(), x, use_reentrant=False)), {}),
    "checkpointed, reentrant": (  # whose function reads tensors unchecked: only a real one does not end the process
        lambda self, x: checkpoint(lambda x: self.b(self.a(x).relu()), x, use_reentrant=True),
        {},
    ),
    "checkpointed with b": (lambda self, x: checkpoint(lambda x: self.b(self.a(x).exp()), x, use_reentrant=False), {}),
    "an array": (softmax_if(lambda self, h: self.sizes[0] > 1), {"sizes": np.ones(1)}),
    "a dropout": (lambda self, x: self.b(self.drop(self.a(x))), {"drop": nn.Dropout(0.1)}),
    "dropout by a function": (lambda self, x: self.b(F.dropout(self.a(x), 0.5, self.training).sin()), {}),
}


@on_ranks(2)
@in_first_rank
def test_what_is_always_the_same_is_proven(rank, group):
    for kind, (forward, parts) in PROVEN.items():
        model = odd(forward, **parts)(Layers(group))
        state = torch.get_rng_state()
        segments, reasons = convert_and_find(model, group)
        if kind == "dropout by a function":  # which cannot be keyed by the unit
            assert "it drops elements in a function" in reasons["b"]
        else:
            assert [one.name for one in segments] == ["b"] and reasons == {}, (kind, reasons)
        assert torch.equal(state, torch.get_rng_state()) and "forward" not in vars(model.a), kind
