"""Optimizers that see more than one element at once are seen through, and no others."""

import threading
import types

import pytest
import torch
from torch import nn

import zeroresize as zr
from zeroresize.optim import independence
from zeroresize.optim.independence import why_not_by_parameter, why_not_elementwise
from zeroresize.optim.optimizers import hook_steps

ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


class Lion(torch.optim.Optimizer):
    """One that torch does not have, element by element."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(parameter, group["lr"], self.state[parameter])

    def change(self, parameter, lr, state):
        moment = state.setdefault("moment", torch.zeros_like(parameter))
        parameter.data.add_((0.9 * moment + 0.1 * parameter.grad).sign(), alpha=-lr)
        moment.lerp_(parameter.grad, 0.01)


class Lamb(Lion):
    """By the norms of whole matrices."""

    def change(self, parameter, lr, state):
        parameter.data.add_(parameter.grad * parameter.data.norm() / (parameter.grad.norm() + 1e-6), alpha=-lr)


class RowMean(Lion):
    """By the means of rows, so that only columns cannot be divided."""

    def change(self, parameter, lr, state):
        parameter.data.sub_(lr * parameter.grad / (parameter.grad.square().mean(-1, keepdim=True).sqrt() + 1e-6))


class Later(Lion):
    """Element by element until it begins with something else."""

    def change(self, parameter, lr, state):
        state["step"] = state.get("step", 0) + 1
        parameter.data.sub_(lr * parameter.grad * (parameter.grad.norm() if state["step"] > 5 else 1.0))


class Blocks(Lion):
    """By blocks of 256 elements, of large tensors only, as 8-bit optimizers do it."""

    def change(self, parameter, lr, state):
        scale = torch.ones_like(parameter).flatten()
        if parameter.numel() >= 4096:
            scale = torch.cat([part.abs().max().expand(len(part)) for part in parameter.grad.flatten().split(256)])
        parameter.data.sub_(lr * parameter.grad * scale.view_as(parameter))


class Multiples(Lion):
    """By blocks of 256 elements where they fit, as torchao's 8-bit optimizers do it."""

    def change(self, parameter, lr, state):
        scale = torch.ones_like(parameter).flatten()
        if parameter.numel() >= 4096 and parameter.numel() % 256 == 0:
            scale = torch.cat([part.abs().max().expand(256) for part in parameter.grad.flatten().split(256)])
        parameter.data.sub_(lr * parameter.grad * scale.view_as(parameter))


class AtLeast128(Lion):
    """By means of rows and columns, of large matrices only; of long vectors here, too."""

    def change(self, parameter, lr, state):
        square = parameter.grad.square()
        if min(parameter.shape) >= 128:
            square = square.mean(-1, keepdim=True) * square.mean(0, keepdim=True)
        parameter.data.sub_(lr * parameter.grad / (square.sqrt() + 1e-8))


class ClipsAt1000(Lion):
    """By the norm of all gradients, where it is large."""

    def step(self):
        params = [one for one in self.param_groups[0]["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in params]).norm()
        for parameter in params:
            parameter.data.sub_(0.1 * parameter.grad * torch.clamp(1e3 / norm, max=1.0))


class AcrossParameters(Lion):
    """By the norm of all gradients."""

    def step(self):
        params = self.param_groups[0]["params"]
        norm = sum(one.grad.norm() for one in params if one.grad is not None)
        for parameter in params:
            parameter.data.sub_(0.1 * parameter.grad * norm)


class Noisy(Lion):
    def change(self, parameter, lr, state):
        parameter.data.sub_(lr * (parameter.grad + torch.randn_like(parameter)))


class Lazy(Lion):
    def step(self):
        pass


class Locks(Lion):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.lock = threading.Lock()


class Totals(Lion):
    """Keeps the norm of all gradients, and steps by it from some size on alone."""

    def step(self):
        self.total = sum(float(one.grad.norm()) for one in self.param_groups[0]["params"])
        super().step()


def parameters(dtype=torch.float32, matrices_only=False):
    shapes = [(6, 5)] if matrices_only else [(6, 5), (7,)]
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torchs_classes_that_are_known_pass_the_trial_too(monkeypatch, name):
    params = parameters()
    optimizer = getattr(torch.optim, name)(params, lr=0.0)  # as a warm-up begins
    assert why_not_elementwise(optimizer, params) is None
    monkeypatch.setattr(independence, "_known", set())
    assert why_not_elementwise(optimizer, params) is None and why_not_by_parameter(optimizer, params) is None


@pytest.mark.parametrize(
    "settings",
    [{"fused": True, "amsgrad": True}, {"foreach": True}, {"lr": torch.tensor(0.1), "foreach": False}],
    ids=["fused", "foreach", "tensor"],
)
def test_a_subclass_of_a_known_class_is_tried_with_its_settings(settings):
    params = parameters()
    assert why_not_elementwise(type("Own", (torch.optim.AdamW,), {})(params, **settings), params) is None


@pytest.mark.parametrize(
    "kind", [Lamb, RowMean, Later, Blocks, Multiples, AtLeast128, ClipsAt1000, AcrossParameters, Noisy]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_sees_more_than_an_element_is_refused(kind, dtype):
    params = parameters(dtype)
    reason = why_not_elementwise(kind(params, lr=1e-9), params)
    assert f"{kind.__name__} is not element-wise: in a trial its steps on a tensor" in reason
    assert "mark_elementwise" not in reason  # what was seen to be so is nothing to give one's word for


@pytest.mark.parametrize("name", [name for name in ("Muon", "Adafactor", "LBFGS") if hasattr(torch.optim, name)])
def test_torchs_classes_that_see_matrices_are_refused(name):
    params = parameters(matrices_only=True)
    assert why_not_elementwise(getattr(torch.optim, name)(params, lr=0.1), params) is not None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Lazy, "in a trial it did not step"),
        (Locks, "a trial of a copy failed (TypeError: cannot pickle '_thread.lock' object)"),
        (Totals, "in a trial its total followed the gradients of other elements"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_the_reason(kind, reason):
    params = parameters()
    reason_given = why_not_elementwise(kind(params, lr=0.1), params)
    assert reason in reason_given and "say so by zeroresize.mark_elementwise(" in reason_given


def test_the_users_word_counts_for_that_class_alone(monkeypatch):
    monkeypatch.setattr(independence, "_elementwise", set())
    params = parameters()
    assert zr.mark_elementwise(Noisy) is Noisy
    assert why_not_elementwise(Noisy(params, lr=0.1), params) is None
    assert why_not_elementwise(type("Noisier", (Noisy,), {})(params, lr=0.1), params) is not None
    with pytest.raises(ValueError, match="wanted is the class of an optimizer"):
        zr.mark_elementwise(Noisy(params, lr=0.1))


def test_only_the_groups_of_the_divided_tensors_count():
    class Mixed(Lion):
        def __init__(self, params, lr, by_norm=False):
            torch.optim.Optimizer.__init__(self, params, {"lr": lr, "by_norm": by_norm})

        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(
                        parameter.grad * (parameter.grad.norm() if group["by_norm"] else 1.0), alpha=group["lr"]
                    )

    first, second = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    optimizer = Mixed([{"params": [first], "by_norm": True}, {"params": [second]}], lr=0.1)
    assert why_not_elementwise(optimizer, [second]) is None
    assert why_not_elementwise(optimizer, [first, second]) is not None


def test_a_trial_leaves_parameters_state_and_random_numbers_as_they_were():
    params = parameters()
    optimizer = Noisy(params, lr=0.1)
    before = torch.get_rng_state()
    why_not_elementwise(optimizer, params)
    assert torch.equal(torch.get_rng_state(), before) and not optimizer.state
    assert all(bool((one == 1.0).all()) and one.grad is None for one in params)


class Wrapper:
    """Of somebody else's, such as apex's LARC, which scales by norms."""

    def __init__(self, optim):
        self.optim = optim


def test_wrappers_of_known_hosts_are_seen_through_and_others_are_not(monkeypatch):
    monkeypatch.setattr(independence, "_elementwise", {torch.optim.SGD})
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    assert "it is a wrapper of an optimizer that is not known" in why_not_elementwise(Wrapper(optimizer), params)
    colossalais = type("OptimizerWrapper", (Wrapper,), {"__module__": "colossalai.interface.optimizer"})
    assert why_not_elementwise(colossalais(optimizer), params) is None
    assert why_not_elementwise(colossalais(Lamb(params, lr=0.1)), params) is not None
    zr.mark_elementwise(Wrapper)
    assert why_not_elementwise(Wrapper(optimizer), params) is None
    assert why_not_elementwise(Wrapper(Lamb(params, lr=0.1)), params) is not None


def test_accelerates_wrapper_is_seen_through():
    accelerate = pytest.importorskip("accelerate")
    params = parameters()
    for inner, is_refused in ((torch.optim.AdamW(params), False), (Lamb(params, lr=0.1), True)):
        wrapped = accelerate.optimizer.AcceleratedOptimizer.__new__(accelerate.optimizer.AcceleratedOptimizer)
        wrapped.optimizer = inner
        assert (why_not_elementwise(wrapped, params) is not None) == is_refused


@pytest.mark.parametrize("kind", [Lamb, RowMean, Noisy])
def test_matrices_by_themselves_may_lie_on_different_ranks(kind):
    params = parameters()
    is_refused = kind is Noisy
    assert (why_not_by_parameter(kind(params, lr=0.1), params) is not None) == is_refused


@pytest.mark.parametrize("kind", [AcrossParameters, ClipsAt1000, torch.optim.LBFGS])
def test_what_sees_other_parameters_may_not(kind):
    params = parameters()
    assert "parameter by parameter" in why_not_by_parameter(kind(params, lr=0.1), params)


def test_the_users_word_for_parameters_says_nothing_of_elements(monkeypatch):
    monkeypatch.setattr(independence, "_by_parameter", set())
    params = parameters()
    assert why_not_by_parameter(Noisy(params, lr=0.1), params) is not None
    assert zr.mark_by_parameter(Noisy) is Noisy
    assert why_not_by_parameter(Noisy(params, lr=0.1), params) is None
    assert "Noisy is not element-wise" in why_not_elementwise(Noisy(params, lr=0.1), params)


class ByAttribute(torch.optim.SGD):
    """Scales by norms where an attribute says so, of which its groups and defaults know nothing."""

    def __init__(self, params, lr, trust=False):
        super().__init__(params, lr=lr)
        self.trust = trust

    def is_trusted(self):
        return self.trust

    def step(self):
        if self.is_trusted():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(parameter.data.norm() / (parameter.grad.norm() + 1e-6))
        super().step()


class BySettings(ByAttribute):
    def __init__(self, params, lr, trust=False):
        super().__init__(params, lr)
        self.settings, self.call = types.SimpleNamespace(trust=[trust]), self.is_trusted
        self._trust, self.mine = trust, [one for group in self.param_groups for one in group["params"]]
        del self.trust

    def is_trusted(self):
        return self.settings.trust[0]

    def step(self):
        self.trust = self.call()
        super().step()


@pytest.mark.parametrize("kind", [ByAttribute, BySettings])
def test_a_trial_has_the_settings_that_are_attributes(kind):
    params = parameters()
    assert "is not element-wise" in why_not_elementwise(kind(params, lr=0.1, trust=True), params)
    assert why_not_elementwise(kind(params, lr=0.1), params) is None
    later = kind(params, lr=0.1)
    if kind is ByAttribute:
        later.trust = True
        assert "is not element-wise" in why_not_elementwise(later, params)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Lion])
def test_schedulers_profilers_and_balancers_may_hang_on_an_instance(kind):
    params = parameters()
    optimizer = kind(params, lr=0.1)
    for _ in range(2):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    hook_steps(optimizer, Lazy(params, 0.1).step, Lazy(params, 0.1).step)
    optimizer.register_step_post_hook(torch.profiler._optimizer_post_hook)
    assert "step" in vars(optimizer) and why_not_elementwise(optimizer, params) is None


class Holder:
    """As apex and DeepSpeed wrap optimizers."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.__dict__["optimizer"], name)


def test_other_wrappers_and_what_is_no_optimizer_are_refused(monkeypatch):
    monkeypatch.setattr(independence, "_elementwise", set())
    params = parameters()
    wrapped = Holder(torch.optim.SGD(params, lr=0.1))
    assert "Holder is not known" in why_not_elementwise(wrapped, params)
    assert "it is no torch.optim.Optimizer and holds none" in why_not_elementwise(object(), params)
    zr.mark_elementwise(Holder)
    assert why_not_elementwise(wrapped, params) is None
    assert why_not_elementwise(Holder(Lamb(params, lr=0.1)), params) is not None


class Momentum(torch.optim.Optimizer):
    """SGD with momentum that is kept where ``where`` says."""

    def __init__(self, params, lr=0.1, where="list"):
        super().__init__(params, {"lr": lr})
        self.where, self.kept = where, {}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for at, parameter in enumerate(group["params"]):
                kept = {"attribute": self.kept, "group": group.setdefault("kept", {}), "state": self.state[parameter]}[
                    self.where
                ]
                key = "momentum" if self.where == "state" else at
                momentum = kept.setdefault(key, torch.zeros_like(parameter))
                parameter.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=group["lr"])


@pytest.mark.parametrize("where", ["attribute", "group", "state"])
@pytest.mark.parametrize("why_not", [why_not_elementwise, why_not_by_parameter])
def test_what_is_kept_elsewhere_than_in_the_state_would_stay_behind(why_not, where):
    params = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))]
    reason = why_not(Momentum(params, where=where), params)
    if where == "state":
        assert reason is None
    else:
        assert "kept tensors in " in reason and "kept" in reason and "moves along" in reason
