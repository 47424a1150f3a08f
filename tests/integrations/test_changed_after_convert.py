"""What is changed in a model after it was converted is seen before units move: they stay, and the reason is told."""

import random

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from torch import nn
from torch.nn.modules import module as modules_of_torch

import zeroresize as zr
from zeroresize import ColumnParallelLinear, RowParallelLinear
from zeroresize.conversion import balanced_layers
from zeroresize.integrations import known_modules
from zeroresize.integrations.known_modules import register_elementwise
from zeroresize.layers.segments import owned_segments
from zeroresize.resharding.agreement import CannotMoveError

WIDTH, INNER = 8, 12


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.up = ColumnParallelLinear.from_linear(nn.Linear(WIDTH, INNER), process_group=group)
        self.act = nn.GELU()
        self.down = RowParallelLinear.from_linear(nn.Linear(INNER, WIDTH), process_group=group)
        self.mix = False

    def forward(self, x):
        h = self.act(self.up(x))
        if self.mix:
            h = h - h.mean(-1, keepdim=True)
        return self.down(h)


class Other(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.up, self.down = block.up, block.down

    def forward(self, x):
        return self.down(self.up(x).softmax(-1))


def norm(*given):
    return given[-1]


def hook_of(library):
    def hook(gradient):
        return gradient

    hook.__module__ = library
    return hook


def other_class_forward(model):
    class Changed(Block):
        def forward(self, x):
            return self.down(self.up(x).softmax(-1))

    model[0].__class__ = Changed


#: What is done to a model → a part of the reason.
CHANGES = {
    "a flag": (lambda model: setattr(model[0], "mix", True), "mean"),
    "another forward of its class": (other_class_forward, "softmax"),
    "another module with its layers": (lambda model: model.__setitem__(0, Other(model[0])), "elsewhere in the model"),
    "dropout": (lambda model: setattr(model[0], "act", nn.Dropout(0.5)), "dropout that it did not have"),
    "a forward hook on a layer": (
        lambda model: model[0].up.register_forward_hook(norm),
        "0.up has a forward hook.*norm",
    ),
    "on the activation": (lambda model: model[0].act.register_forward_hook(norm), "act has a forward hook"),
    "before": (lambda model: model[0].down.register_forward_pre_hook(norm), "0.down has a forward pre-hook"),
    "on a parameter": (lambda model: model[0].up.weight.register_hook(norm), "0.up has a weight with a hook.*norm"),
    "a buffer's": (
        lambda model: model[0].up.weight.register_hook(hook_of("deepspeed.runtime.zero")),
        "0.up has a weight whose gradients deepspeed.runtime.*hook puts into a buffer, which would not follow$",
    ),
    "an average": (
        lambda model: model[0].up.weight.register_hook(hook_of("transformers.trainer")),
        "0.up has a weight with a hook.*trainer",
    ),
    "on all modules": (
        lambda model: modules_of_torch.register_module_forward_hook(norm),
        "as all modules have, a forward hook",
    ),
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What a test registers is forgotten again."""
    monkeypatch.setattr(known_modules, "_registered", set(known_modules._registered))


def balanced(model, group, **options):
    config = zr.BalanceConfig(start_checks=False)
    zr.convert(model, process_group=group, **options)
    return zr.Balancer(model, torch.optim.AdamW(model.parameters()), process_group=group, config=config)


def converted(group, **options):
    torch.manual_seed(0)
    model = nn.Sequential(Block(group)).double()
    return model, balanced(model, group, **options)


def is_of_layers(kind):
    """Whether it is seen of a segment that is the user's word, too."""
    return CHANGES[kind][1].startswith(("0.", "as all"))


CASES = [*((kind, True) for kind in CHANGES if is_of_layers(kind)), *((kind, False) for kind in CHANGES)]


@on_ranks(2, CASES)
def test_units_stay_where_a_model_was_changed_after_convert(rank, group, kind, is_named):
    """Also with units away: going home is always sound, and coming back is not."""

    change, message = CHANGES[kind]
    named = [zr.Segment(["0.up"], "0.down")] if is_named else []
    model, balancer = converted(group, segments=named)
    balancer.move((2, 1))
    if rank == 0 or not is_of_layers(kind):  # hooks on one rank are enough
        changed = change(model)
    with pytest.raises(CannotMoveError, match=message):
        balancer.move((1, 2))
    balancer.move((1, 1))
    with pytest.raises(CannotMoveError, match=message):
        balancer.move((2, 1))
    balancer.close()
    if kind == "on all modules" and rank == 0:
        changed.remove()


@on_ranks(2)
def test_hooks_that_treat_elements_alike_can_be_named(rank, group):
    register_elementwise(norm)
    model, balancer = converted(group)
    model[0].up.weight.register_hook(norm)
    model[0].act.register_forward_hook(norm)
    balancer.move((2, 1))
    balancer.close()
    assert gathered(group, model[0].up.weight.shape[0]) == [8, 4]


@on_ranks(2)
def test_asking_again_leaves_everything_as_it_was(rank, group):
    model, balancer = converted(group)
    model[0].act.eval()
    before = [torch.get_rng_state(), random.getstate(), dict(vars(model[0])), model[0].act.training]
    (segment,) = owned_segments(balanced_layers(model))
    assert segment.why_even() is None
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert before[2] == dict(vars(model[0])) and model[0].act.training is before[3]
    balancer.close()
