"""What an optimizer knows of single parameters, such as a mark or a name, is known in its trials, too."""

import numpy as np
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


class ByMarkAndSize(ByNorm):
    def sees(self, parameter, name):
        return getattr(parameter, "use_muon", False) and min(parameter.shape) >= 128


class ByMarkAndLater(ByNorm):
    def sees(self, parameter, name):
        state = self.state[parameter]
        state["count"] = state.get("count", 0) + 1
        return getattr(parameter, "use_muon", False) and state["count"] > 9


KINDS = [ByMark, ByName, ByState, ByDtype, ByMarkAndSize, ByMarkAndLater]


def made(kind, sees, size=(6, 5)):
    """An optimizer that sees two of its four parameters as matrices, or none of them."""
    dtype = torch.bfloat16 if kind is ByDtype and sees else torch.float32
    up = "up" if kind is not ByName or sees else "other"
    names = ("in.weight", f"0.{up}.weight", f"1.{up}.weight", "down.weight")
    params_of_name = {name: nn.Parameter(torch.ones(size, dtype=dtype)) for name in names}
    optimizer = kind(params_of_name.items(), lr=0.1)
    for name in names[1:3]:
        params_of_name[name].use_muon = sees
        if kind is ByState:
            optimizer.state[params_of_name[name]].update(use_muon=sees)
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
    if kind is not ByMarkAndSize:  # no matrix of a trial is that large
        assert why_not_by_parameter(optimizer, params) is None
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


def test_what_knows_parameters_themselves_knows_those_of_a_trial():
    params = [nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(6, 5))]
    by_id, in_group, appended = ById(params, lr=0.1), InGroup(params, lr=0.1), AppendedLater(params, lr=0.1)
    in_group.param_groups[0]["matrices"] = (id(params[0]),)
    appended.matrices.append(params[0])
    for optimizer in (by_id, in_group, appended):
        assert "is not element-wise" in why_not_elementwise(optimizer, params)
    params[0].twin = nn.Parameter(torch.ones(6, 5))
    reason = why_not_elementwise(Lion(params, lr=0.1), params)
    assert "it kept tensors in the attribute twin of its parameters" in reason


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
    named = [
        type(name, (ByDistance,), {"__module__": module})
        for module, name in (("prodigyopt.prodigy", "Prodigy"), ("dadaptation.dadapt_adam", "DAdaptAdam"))
    ]
    for kind in (*named, type("Own", (named[0],), {})):
        for why_not in (why_not_elementwise, why_not_by_parameter):
            assert "its step size is a norm over all parameters" in why_not(kind(params), params)
    for why_not, call in ((why_not_elementwise, "mark_elementwise"), (why_not_by_parameter, "mark_by_parameter")):
        reason = why_not(ByDistance(params), params)
        assert "in a trial its number d" in reason and call in reason


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


class WholeState(Lion):
    def step(self):
        self.state["count"] = {"norm": 1.0}
        super().step()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Factored, "its state row of a tensor (64, 96) was a tensor (64,)"),
        (CountedNorm, "were others in some elements where the gradients of other elements were 1000 times as large"),
        (Cautious, "were others"),
        (WholeState, "it kept state that is no parameter's"),
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


class Holder:
    __slots__ = ("d", "n")


class ByNormSoFar(torch.optim.Optimizer):
    """As D-Adaptation: its step size begins small, and follows a norm over all parameters; held where it is told to."""

    def __init__(self, params, tracker, read, write):
        super().__init__(params, {"lr": 1.0})
        self.tracker, self.read, self.write = tracker, read, write

    @torch.no_grad()
    def step(self, closure=None):
        d, n = self.read(self.tracker)
        n += sum(float(one.grad.abs().sum()) for group in self.param_groups for one in group["params"]) * float(d) ** 2
        d = max(d, n) if n > 1e-2 else d
        self.write(self.tracker, d, n)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(float(d) * parameter.grad.sign())


def _read_slots(tracker):
    return tracker.d, tracker.n


def _write_slots(tracker, d, n):
    tracker.d, tracker.n = d, n


def _read_nested(tracker):
    return tracker["of all"][0]


def _write_nested(tracker, d, n):
    tracker["of all"][0] = (d, n)


def _read_list(tracker):
    return tracker


def _write_list(tracker, d, n):
    tracker[:] = [d, n]


def _write_tensors(tracker, d, n):
    tracker[0].fill_(float(d))
    tracker[1].fill_(float(n))


def test_numbers_that_follow_gradients_are_found_wherever_an_optimizer_holds_them():
    slots = Holder()
    slots.d, slots.n = 1e-6, 0.0
    for tracker, read, write in (
        ({"of all": [(1e-6, 0.0)]}, _read_nested, _write_nested),
        ([1e-6, 0.0], _read_list, _write_list),
        ([torch.tensor(1e-6), torch.zeros(1)], _read_list, _write_tensors),
        (np.array([1e-6, 0.0]), _read_list, _write_list),
        (slots, _read_slots, _write_slots),
    ):
        params = [nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(5, 6))]
        assert "its number tracker" in why_not_elementwise(ByNormSoFar(params, tracker, read, write), params)
