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
            for parameter in group["params"]:
                norm = 1.0
                if any(parameter is other for other in seen):
                    norm = norms.norm() if self.together else parameter.grad.float().norm()
                parameter.data.sub_((group["lr"] * parameter.grad / (norm + 1e-8)).to(parameter.dtype))

    def sees(self, parameter, name):
        raise NotImplementedError


class ByMark(ByNorm):
    def sees(self, parameter, name):
        return getattr(parameter, "use_muon", False)


class ByName(ByNorm):
    def sees(self, parameter, name):
        return name.endswith("up.weight")


class ByState(ByNorm):
    def sees(self, parameter, name):
        return self.state[parameter].get("use_muon", False)


class ByDtype(ByNorm):
    def sees(self, parameter, name):
        return parameter.dtype == torch.bfloat16


class BySize(ByNorm):
    def sees(self, parameter, name):
        return parameter.dim() > 1 and min(parameter.shape) >= 512


class ByMarkAndSize(ByNorm):
    def sees(self, parameter, name):
        return getattr(parameter, "use_muon", False) and min(parameter.shape) >= 512


class ByMarkAndLater(ByNorm):
    def sees(self, parameter, name):
        state = self.state[parameter]
        state["count"] = state.get("count", 0) + 1
        return getattr(parameter, "use_muon", False) and state["count"] > 9


KINDS = [ByMark, ByName, ByState, ByDtype, BySize, ByMarkAndSize, ByMarkAndLater]


def made(kind, sees, size=(6, 5)):
    """An optimizer that sees the second of its three parameters as a matrix, or none of them."""
    dtype = torch.bfloat16 if kind is ByDtype and sees else torch.float32
    if kind in (BySize, ByMarkAndSize):
        size = (600, 600) if sees or kind is ByMarkAndSize else (100, 600)
    params_of_name = {
        name: nn.Parameter(torch.ones(size, dtype=dtype)) for name in ("in.weight", "up.weight", "down.weight")
    }
    params_of_name["up.weight"].use_muon = sees
    if kind is ByName and not sees:
        params_of_name["other.weight"] = params_of_name.pop("up.weight")
    optimizer = kind(params_of_name.items(), lr=0.1)
    if kind is ByState:
        optimizer.state[params_of_name["up.weight"]].update(use_muon=sees)
    return optimizer, list(params_of_name.values())


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_that_are_told_by_what_is_at_a_parameter_are_found(kind):
    optimizer, params = made(kind, True)
    assert f"{kind.__name__} is not element-wise: in a trial" in why_not_elementwise(optimizer, params)
    optimizer, params = made(kind, False)
    assert why_not_elementwise(optimizer, params) is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_sees_all_such_matrices_may_not_lie_on_different_ranks(kind):
    optimizer, params = made(kind, True)
    assert why_not_by_parameter(optimizer, params) is None
    optimizer, params = made(type(kind.__name__, (kind,), {"together": True}), True)
    if kind in (ByDtype, BySize, ByMarkAndSize, ByState):
        optimizer, params = made(kind, True)
        optimizer.together = True
    assert "parameter by parameter" in why_not_by_parameter(optimizer, params)


class ById(ByNorm):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.kinds = {"matrices": [{id(one) for group in self.param_groups for one in group["params"]}]}

    def sees(self, parameter, name):
        return id(parameter) in self.kinds["matrices"][0]


class InGroup(ByNorm):
    def sees(self, parameter, name):
        return id(parameter) in self.param_groups[0]["matrices"]


class AppendedLater(ByNorm):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.matrices = []

    def sees(self, parameter, name):
        return any(parameter is other for other in self.matrices)


def test_what_knows_parameters_themselves_cannot_be_tried():
    params = [nn.Parameter(torch.ones(6, 5))]
    by_id, in_group, appended = ById(params, lr=0.1), InGroup(params, lr=0.1), AppendedLater(params, lr=0.1)
    in_group.param_groups[0]["matrices"] = (id(params[0]),)
    appended.matrices.append(params[0])
    for why_not in (why_not_elementwise, why_not_by_parameter):
        assert "it knows parameters by their id(), in kinds, and those of a trial" in why_not(by_id, params)
        assert "it knows parameters by their id(), in matrices, and" in why_not(in_group, params)
        assert "its attribute matrices has parameters that it was not made with" in why_not(appended, params)
    params[0].twin = nn.Parameter(torch.ones(6, 5))
    reason = why_not_elementwise(Lion(params, lr=0.1), params)
    assert "the attribute twin of its parameters cannot be copied" in reason


def test_numbers_in_names_and_attributes_count_where_they_are_few():
    class OfLayer(ByNorm):
        def sees(self, parameter, name):
            return name == "3.weight" or getattr(parameter, "layer", 0) == 3

    for with_names in (True, False):
        named = [(f"{layer}.weight", nn.Parameter(torch.ones(6, 5))) for layer in range(4)]
        for layer, (_, parameter) in enumerate(named):
            parameter.layer = None if with_names else layer
        parameters = [one for _, one in named]
        optimizer = OfLayer(named if with_names else parameters, lr=0.1)
        assert "OfLayer is not element-wise" in why_not_elementwise(optimizer, parameters)


def test_state_of_steps_before_does_no_harm():
    class Counts(Lion):
        def change(self, parameter, lr, state):
            if not state:
                state.update(moment=torch.zeros_like(parameter), step=0, is_new=True)
            state["step"] += 1
            state["moment"].lerp_(parameter.grad, 0.1)
            parameter.data.sub_(lr * state["moment"] / state["step"])

    params = [nn.Parameter(torch.ones(6, 5))]
    optimizer = Counts(params, lr=0.1)
    params[0].grad = torch.ones(6, 5)
    optimizer.step()
    before = {key: value.clone() if key == "moment" else value for key, value in optimizer.state[params[0]].items()}
    assert why_not_elementwise(optimizer, params) is None and why_not_by_parameter(optimizer, params) is None
    assert {key: value for key, value in before.items() if key != "moment"} == {"step": 1, "is_new": True}
    assert (
        torch.equal(before["moment"], optimizer.state[params[0]]["moment"]) and optimizer.state[params[0]]["step"] == 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_element_wise_optimizers_are_so_in_their_own_dtype(monkeypatch, dtype):
    monkeypatch.setattr(independence, "_known", set())
    for kind in (*(getattr(torch.optim, name) for name in KNOWN), Lion):
        params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((300, 200), (7,))]
        for options in ({}, {"foreach": True}) if kind is not Lion else ({},):
            optimizer = kind(params, lr=0.1, **options)
            assert why_not_elementwise(optimizer, params) is None, (kind, options)
            assert why_not_by_parameter(optimizer, params) is None, (kind, options)


class Forgets(Lion):
    """Keeps none of its settings, as bitsandbytes' optimizers do not keep ``amsgrad``."""

    def __init__(self, params, lr, amsgrad=False):
        super().__init__(params, lr)


class ForgetsBlocks(Forgets):
    def change(self, parameter, lr, state):
        parameter.data.sub_(lr * parameter.grad / parameter.grad.abs().max())


class ForgetsToStep(Forgets):
    def step(self):
        pass


def test_a_word_is_asked_for_only_where_a_trial_with_the_defaults_finds_nothing_against_it():
    params = [nn.Parameter(torch.ones(6, 5))]
    reasons = {
        kind: why_not_elementwise(kind(params, lr=0.1), params) for kind in (Forgets, ForgetsBlocks, ForgetsToStep)
    }
    assert all("does not tell with which amsgrad= it was made" in reason for reason in reasons.values())
    assert "with the defaults a trial finds nothing against it" in reasons[Forgets]
    assert "say so by zeroresize.mark_elementwise(Forgets)" in reasons[Forgets]
    assert "with the defaults in a trial its steps on a tensor (10, 6) were others" in reasons[ForgetsBlocks]
    assert "with the defaults it cannot be tried either: in a trial it did not step" in reasons[ForgetsToStep]
    assert not any("mark_elementwise" in reasons[kind] for kind in (ForgetsBlocks, ForgetsToStep))
    reason = why_not_by_parameter(ForgetsBlocks(params, lr=0.1), params)
    assert "finds nothing against it" in reason and "mark_by_parameter(ForgetsBlocks)" in reason
