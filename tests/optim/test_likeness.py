"""What an optimizer knows of single parameters, such as a mark or a name, is known in its trials, too."""

import pytest
import torch
from test_independence import Lion
from torch import nn

from zeroresize.optim import independence
from zeroresize.optim.independence import why_not_by_parameter, why_not_elementwise

KNOWN = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


class ByNorm(Lion):
    """By the norm of a matrix, or of all of them, where it is told to; else as SGD."""

    together = False

    def step(self):
        for group in self.param_groups:
            names = group.get("param_names", ["none"] * len(group["params"]))
            seen = [one for one, name in zip(group["params"], names, strict=True) if self.sees(one, name)]
            norms = torch.stack([one.grad.float().norm() for one in seen or group["params"]])
            for one in group["params"]:
                norm = 1.0
                if any(one is other for other in seen):
                    norm = norms.norm() if self.together else one.grad.float().norm()
                one.data.sub_((group["lr"] * one.grad / (norm + 1e-8)).to(one.dtype))

    def sees(self, one, name):
        raise NotImplementedError


class ByMark(ByNorm):
    def sees(self, one, name):
        return getattr(one, "use_muon", False)


class ByName(ByNorm):
    def sees(self, one, name):
        return name.endswith("up.weight")


class ByState(ByNorm):
    def sees(self, one, name):
        return self.state[one].get("use_muon", False)


class ByDtype(ByNorm):
    def sees(self, one, name):
        return one.dtype == torch.bfloat16


class BySize(ByNorm):
    def sees(self, one, name):
        return one.dim() > 1 and min(one.shape) >= 512


class ByMarkAndSize(ByNorm):
    def sees(self, one, name):
        return getattr(one, "use_muon", False) and min(one.shape) >= 512


class ByMarkAndLater(ByNorm):
    def sees(self, one, name):
        state = self.state[one]
        state["count"] = state.get("count", 0) + 1
        return getattr(one, "use_muon", False) and state["count"] > 9


KINDS = [ByMark, ByName, ByState, ByDtype, BySize, ByMarkAndSize, ByMarkAndLater]


def made(kind, sees, size=(6, 5)):
    """An optimizer that sees the second of its three parameters as a matrix, or none of them."""
    dtype = torch.bfloat16 if kind is ByDtype and sees else torch.float32
    if kind in (BySize, ByMarkAndSize):
        size = (600, 600) if sees or kind is ByMarkAndSize else (100, 600)
    own = {name: nn.Parameter(torch.ones(size, dtype=dtype)) for name in ("in.weight", "up.weight", "down.weight")}
    own["up.weight"].use_muon = sees
    if kind is ByName and not sees:
        own["other.weight"] = own.pop("up.weight")
    optimizer = kind(own.items(), lr=0.1)
    if kind is ByState:
        optimizer.state[own["up.weight"]].update(use_muon=sees)
    return optimizer, list(own.values())


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_that_are_told_by_what_is_at_a_parameter_are_found(kind):
    optimizer, own = made(kind, True)
    assert f"{kind.__name__} is not element-wise: in a trial" in why_not_elementwise(optimizer, own)
    optimizer, own = made(kind, False)
    assert why_not_elementwise(optimizer, own) is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_sees_all_such_matrices_may_not_lie_on_different_ranks(kind):
    optimizer, own = made(kind, True)
    assert why_not_by_parameter(optimizer, own) is None
    optimizer, own = made(type(kind.__name__, (kind,), {"together": True}), True)
    if kind in (ByDtype, BySize, ByMarkAndSize, ByState):
        optimizer, own = made(kind, True)
        optimizer.together = True
    assert "parameter by parameter" in why_not_by_parameter(optimizer, own)


class ById(ByNorm):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.kinds = {"matrices": [{id(one) for group in self.param_groups for one in group["params"]}]}

    def sees(self, one, name):
        return id(one) in self.kinds["matrices"][0]


class InGroup(ByNorm):
    def sees(self, one, name):
        return id(one) in self.param_groups[0]["matrices"]


class AppendedLater(ByNorm):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.matrices = []

    def sees(self, one, name):
        return any(one is other for other in self.matrices)


def test_what_knows_parameters_themselves_cannot_be_tried():
    own = [nn.Parameter(torch.ones(6, 5))]
    by_id, in_group, appended = ById(own, lr=0.1), InGroup(own, lr=0.1), AppendedLater(own, lr=0.1)
    in_group.param_groups[0]["matrices"] = (id(own[0]),)
    appended.matrices.append(own[0])
    for why_not in (why_not_elementwise, why_not_by_parameter):
        assert "it knows parameters by their id(), in kinds, and those of a trial" in why_not(by_id, own)
        assert "it knows parameters by their id(), in matrices, and" in why_not(in_group, own)
        assert "its attribute matrices has parameters that it was not made with" in why_not(appended, own)
    own[0].twin = nn.Parameter(torch.ones(6, 5))
    told = why_not_elementwise(Lion(own, lr=0.1), own)
    assert "the attribute twin of its parameters cannot be copied" in told


def test_numbers_in_names_and_attributes_count_where_they_are_few():
    class OfLayer(ByNorm):
        def sees(self, one, name):
            return name == "3.weight" or getattr(one, "layer", 0) == 3

    for with_names in (True, False):
        own = [(f"{layer}.weight", nn.Parameter(torch.ones(6, 5))) for layer in range(4)]
        for layer, (_, one) in enumerate(own):
            one.layer = None if with_names else layer
        parameters = [one for _, one in own]
        optimizer = OfLayer(own if with_names else parameters, lr=0.1)
        assert "OfLayer is not element-wise" in why_not_elementwise(optimizer, parameters)


def test_state_of_steps_before_does_no_harm():
    class Counts(Lion):
        def change(self, one, lr, state):
            if not state:
                state.update(moment=torch.zeros_like(one), step=0, is_new=True)
            state["step"] += 1
            state["moment"].lerp_(one.grad, 0.1)
            one.data.sub_(lr * state["moment"] / state["step"])

    own = [nn.Parameter(torch.ones(6, 5))]
    optimizer = Counts(own, lr=0.1)
    own[0].grad = torch.ones(6, 5)
    optimizer.step()
    before = {key: value.clone() if key == "moment" else value for key, value in optimizer.state[own[0]].items()}
    assert why_not_elementwise(optimizer, own) is None and why_not_by_parameter(optimizer, own) is None
    assert {key: value for key, value in before.items() if key != "moment"} == {"step": 1, "is_new": True}
    assert torch.equal(before["moment"], optimizer.state[own[0]]["moment"]) and optimizer.state[own[0]]["step"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_element_wise_optimizers_are_so_in_their_own_dtype(monkeypatch, dtype):
    monkeypatch.setattr(independence, "_known", set())
    for kind in (*(getattr(torch.optim, name) for name in KNOWN), Lion):
        own = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((300, 200), (7,))]
        for options in ({}, {"foreach": True}) if kind is not Lion else ({},):
            optimizer = kind(own, lr=0.1, **options)
            assert why_not_elementwise(optimizer, own) is None, (kind, options)
            assert why_not_by_parameter(optimizer, own) is None, (kind, options)


class Forgets(Lion):
    """Keeps none of its settings, as bitsandbytes' optimizers do not keep ``amsgrad``."""

    def __init__(self, params, lr, amsgrad=False):
        super().__init__(params, lr)


class ForgetsBlocks(Forgets):
    def change(self, one, lr, state):
        one.data.sub_(lr * one.grad / one.grad.abs().max())


class ForgetsToStep(Forgets):
    def step(self):
        pass


def test_a_word_is_asked_for_only_where_a_trial_with_the_defaults_finds_nothing_against_it():
    own = [nn.Parameter(torch.ones(6, 5))]
    told = {kind: why_not_elementwise(kind(own, lr=0.1), own) for kind in (Forgets, ForgetsBlocks, ForgetsToStep)}
    assert all("does not tell with which amsgrad= it was made" in reason for reason in told.values())
    assert "with the defaults a trial finds nothing against it" in told[Forgets]
    assert "say so by zeroresize.mark_elementwise(Forgets)" in told[Forgets]
    assert "with the defaults in a trial its steps on a tensor (10, 6) were others" in told[ForgetsBlocks]
    assert "with the defaults it cannot be tried either: in a trial it did not step" in told[ForgetsToStep]
    assert not any("mark_elementwise" in told[kind] for kind in (ForgetsBlocks, ForgetsToStep))
    reason = why_not_by_parameter(ForgetsBlocks(own, lr=0.1), own)
    assert "finds nothing against it" in reason and "mark_by_parameter(ForgetsBlocks)" in reason
