"""What an optimizer knows of single parameters, such as a mark, is known in its trials, too."""

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
            seen = [one for one in group["params"] if self.sees(one)]
            norms = torch.stack([one.grad.float().norm() for one in seen or group["params"]])
            for parameter in group["params"]:
                norm = 1.0
                if any(parameter is other for other in seen):
                    norm = norms.norm() if self.together else parameter.grad.float().norm()
                parameter.data.sub_((group["lr"] * parameter.grad / (norm + 1e-8)).to(parameter.dtype))

    def sees(self, parameter):
        raise NotImplementedError


class ByMark(ByNorm):
    def sees(self, parameter):
        return getattr(parameter, "use_muon", False)


class ByDtype(ByNorm):
    def sees(self, parameter):
        return parameter.dtype == torch.bfloat16


class ByMarkAndSize(ByNorm):
    def sees(self, parameter):
        return getattr(parameter, "use_muon", False) and min(parameter.shape) >= 128


class ByMarkAndLater(ByNorm):
    def sees(self, parameter):
        state = self.state[parameter]
        state["count"] = state.get("count", 0) + 1
        return getattr(parameter, "use_muon", False) and state["count"] > 9


KINDS = [ByMark, ByDtype, ByMarkAndSize, ByMarkAndLater]


def made(kind, sees):
    """An optimizer that sees two of its four parameters as matrices, or none of them."""
    dtype = torch.bfloat16 if kind is ByDtype and sees else torch.float32
    params = [nn.Parameter(torch.ones(6, 5, dtype=dtype)) for _ in range(4)]
    for parameter in params[1:3]:
        parameter.use_muon = sees
    return kind(params, lr=0.1), params


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
    optimizer.together = True
    assert "parameter by parameter" in why_not_by_parameter(optimizer, params)


class AppendedLater(ByNorm):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.matrices = []

    def sees(self, parameter):
        return any(parameter is other for other in self.matrices)


def test_what_knows_parameters_themselves_knows_those_of_a_trial():
    params = [nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(6, 5))]
    optimizer = AppendedLater(params, lr=0.1)
    optimizer.matrices.append(params[0])
    assert "is not element-wise" in why_not_elementwise(optimizer, params)


def test_state_of_steps_before_does_no_harm():
    class Counts(Lion):
        def change(self, parameter, lr, state):
            if not state:
                state.update(moment=torch.zeros_like(parameter), step=0)
            state["step"] += 1
            state["moment"].lerp_(parameter.grad, 0.1)
            parameter.data.sub_(lr * state["moment"] / state["step"])

    params = [nn.Parameter(torch.ones(6, 5))]
    optimizer = Counts(params, lr=0.1)
    params[0].grad = torch.ones(6, 5)
    optimizer.step()
    before = {key: value.clone() if key == "moment" else value for key, value in optimizer.state[params[0]].items()}
    assert why_not_elementwise(optimizer, params) is None and why_not_by_parameter(optimizer, params) is None
    assert {key: value for key, value in before.items() if key != "moment"} == {"step": 1}
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


class ByDistance(Lion):
    """As Prodigy and DAdaptAdam: the step size begins at 1e-6 and is a quotient of sums over all parameters."""

    def __init__(self, params, lr=1.0):
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "d": 1e-6, "d_numerator": 0.0, "k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            denominator = 0.0
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("first", parameter.clone())
                sum_s = state.setdefault("s", torch.zeros_like(parameter))
                sum_s.add_(parameter.grad, alpha=group["d"])
                moved = state["first"] - parameter
                group["d_numerator"] += group["d"] * float((parameter.grad * moved).sum())
                denominator += float(sum_s.abs().sum())
                parameter.sub_(group["lr"] * group["d"] * parameter.grad)
            group["d"] = max(group["d"], group["d_numerator"] / denominator)
            group["k"] += 1


def test_step_sizes_by_norms_are_found_though_they_begin_small():
    params = [nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(7))]
    for why_not, call in ((why_not_elementwise, "mark_elementwise"), (why_not_by_parameter, "mark_by_parameter")):
        reason = why_not(ByDistance(params), params)
        assert "in a trial its param_groups[0]['d" in reason and call in reason


class Factored(Lion):
    """As Adafactor keeps its second moments, of large matrices by rows and columns, and steps by them later."""

    def change(self, parameter, lr, state):
        row = state.setdefault("row", torch.zeros(parameter.shape[0]))
        row.lerp_(parameter.grad.square().flatten(1).mean(1) if parameter.dim() > 1 else parameter.grad.square(), 0.1)
        parameter.data.sub_(lr * parameter.grad.sign())


class CountedNorm(Lion):
    def change(self, parameter, lr, state):
        state["norm"] = float(parameter.grad.norm())
        parameter.data.sub_(lr * parameter.grad.sign())


class Cautious(Lion):
    """Steps where moment and gradient agree, and the more the fewer do."""

    def change(self, parameter, lr, state):
        moment = state.setdefault("moment", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        mask = (moment * parameter.grad > 0).to(parameter.dtype)
        parameter.data.sub_(lr * moment.sign() * mask / mask.mean().clamp_min(1e-3))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Factored, "its state row of a tensor (128, 192) was a tensor (128,)"),
        (CountedNorm, "were others where the gradients of other elements were 1000 times as large"),
        (Cautious, "were others"),
    ],
)
def test_state_and_steps_that_depend_on_other_elements_are_found(kind, expected):
    params = [nn.Parameter(torch.ones(6, 5))]
    assert expected in why_not_elementwise(kind(params, lr=0.1), params)


class AdaBelief(torch.optim.Optimizer):
    """Element by element, with numbers of all kinds that change alike whatever gradients are."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999)):
        super().__init__(params, {"lr": lr, "betas": betas, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=torch.tensor(0.0), m=torch.zeros_like(parameter), s=torch.zeros_like(parameter))
                state["step"] += 1
                state["decay"] = 0.9 ** int(state["step"])
                state["m"].lerp_(parameter.grad, 1 - group["betas"][0])
                state["s"].lerp_((parameter.grad - state["m"]).square(), 1 - group["betas"][1])
                parameter.mul_(1 - 0.01 * group["lr"])
                step_size = group["lr"] / (1 - state["decay"])
                parameter.sub_(step_size * state["m"] / (state["s"].sqrt() + 1e-8))


@pytest.mark.parametrize("kind", [Lion, AdaBelief])
def test_element_wise_optimizers_of_others_are_accepted_with_groups_and_dtypes(kind):
    for dtype in (torch.float32, torch.bfloat16):
        params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((6, 5), (7,), (5, 6), (3, 4, 2))]
        optimizer = kind([{"params": params[:1]}, {"params": params[1:], "lr": 0.0}], lr=0.1)
        assert why_not_elementwise(optimizer, params) is None and why_not_by_parameter(optimizer, params) is None


class ByNormSoFar(torch.optim.Optimizer):
    """As D-Adaptation: its step size begins small, and follows a norm over all parameters; held in an attribute."""

    def __init__(self, params, tracker):
        super().__init__(params, {"lr": 1.0})
        self.tracker = tracker

    @torch.no_grad()
    def step(self, closure=None):
        d, n = self.tracker["of all"]
        n += sum(float(one.grad.abs().sum()) for group in self.param_groups for one in group["params"]) * float(d) ** 2
        self.tracker["of all"] = [n if n > 1e-2 else d, n]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(float(d) * parameter.grad.sign())


@pytest.mark.parametrize("start", [0.0, torch.tensor(0.0)])
def test_numbers_that_follow_gradients_are_found_in_attributes(start):
    params = [nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(5, 6))]
    reason = why_not_elementwise(ByNormSoFar(params, {"of all": [1e-6, start]}), params)
    assert "in a trial its tracker['of all'][1] followed" in reason
