"""Optimizers that see more than one element at once are seen through, and no others."""

import functools

import pytest
import torch
from torch import nn

import zeroresize as zr
from zeroresize.optim import independence
from zeroresize.optim.independence import why_not_by_parameter, why_not_elementwise

ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


class Lion(torch.optim.Optimizer):
    """One that torch does not have, element by element."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self.change(one, group["lr"], self.state[one])

    def change(self, one, lr, state):
        moment = state.setdefault("moment", torch.zeros_like(one))
        one.data.add_((0.9 * moment + 0.1 * one.grad).sign(), alpha=-lr)
        moment.lerp_(one.grad, 0.01)


class Lamb(Lion):
    """By the norms of whole matrices."""

    def change(self, one, lr, state):
        one.data.add_(one.grad * one.data.norm() / (one.grad.norm() + 1e-6), alpha=-lr)


class RowMean(Lion):
    """By the means of rows, so that only columns cannot be divided."""

    def change(self, one, lr, state):
        one.data.sub_(lr * one.grad / (one.grad.square().mean(-1, keepdim=True).sqrt() + 1e-6))


class Later(Lion):
    """Element by element until it begins with something else."""

    def change(self, one, lr, state):
        state["step"] = state.get("step", 0) + 1
        one.data.sub_(lr * one.grad * (one.grad.norm() if state["step"] > 5 else 1.0))


class Blocks(Lion):
    """By blocks of 256 elements, of large tensors only, as 8-bit optimizers do it."""

    def change(self, one, lr, state):
        scale = torch.ones_like(one).flatten()
        if one.numel() >= 4096:
            scale = torch.cat([part.abs().max().expand(len(part)) for part in one.grad.flatten().split(256)])
        one.data.sub_(lr * one.grad * scale.view_as(one))


class AcrossParameters(Lion):
    """By the norm of all gradients."""

    def step(self):
        params = self.param_groups[0]["params"]
        norm = sum(one.grad.norm() for one in params if one.grad is not None)
        for one in params:
            one.data.sub_(0.1 * one.grad * norm)


class Noisy(Lion):
    def change(self, one, lr, state):
        one.data.sub_(lr * (one.grad + torch.randn_like(one)))


class NotForZeroElements(Lion):
    def change(self, one, lr, state):
        one.data.sub_(lr * one.grad * (one.shape[-1] / one.shape[0]) ** 0)


class Lazy(Lion):
    def step(self):
        pass


class NeedsMore(Lion):
    def __init__(self, params, lr, closure):
        super().__init__(params, lr)


def parameters(dtype=torch.float32, matrices_only=False):
    shapes = [(6, 5)] if matrices_only else [(6, 5), (7,)]
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torchs_classes_that_are_known_pass_the_trial_too(monkeypatch, name):
    own = parameters()
    optimizer = getattr(torch.optim, name)(own, lr=0.0)  # as a warm-up begins
    assert why_not_elementwise(optimizer, own) is None
    monkeypatch.setattr(independence, "_elementwise", set())
    assert why_not_elementwise(optimizer, own) is None and why_not_by_parameter(optimizer, own) is None


@pytest.mark.parametrize(
    "settings",
    [{"fused": True, "amsgrad": True}, {"foreach": True}, {"lr": torch.tensor(0.1), "foreach": False}],
    ids=["fused", "foreach", "tensor"],
)
def test_a_subclass_of_a_known_class_is_tried_with_its_settings(settings):
    own = parameters()
    assert why_not_elementwise(type("Own", (torch.optim.AdamW,), {})(own, **settings), own) is None


@pytest.mark.parametrize("kind", [Lamb, RowMean, Later, Blocks, AcrossParameters, Noisy])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_sees_more_than_an_element_is_refused(kind, dtype):
    own = parameters(dtype)
    reason = why_not_elementwise(kind(own, lr=1e-9), own)
    assert (
        f"{kind.__name__} is not known to treat tensors element by element: in a trial its steps on a tensor" in reason
    )
    assert f"zeroresize.mark_elementwise({kind.__name__})" in reason


@pytest.mark.parametrize("name", [name for name in ("Muon", "Adafactor", "LBFGS") if hasattr(torch.optim, name)])
def test_torchs_classes_that_see_matrices_are_refused(name):
    own = parameters(matrices_only=True)
    assert why_not_elementwise(getattr(torch.optim, name)(own, lr=0.1), own) is not None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (NotForZeroElements, "a trial step on tensors (0, 6) and (4, 6) failed (ZeroDivisionError"),
        (Lazy, "in a trial it did not step"),
        (functools.partial(NeedsMore, closure=print), "none could be made for a trial (TypeError"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_the_reason(kind, reason):
    own = parameters()
    assert reason in why_not_elementwise(kind(own, lr=0.1), own)


def test_the_users_word_counts_for_that_class_alone(monkeypatch):
    monkeypatch.setattr(independence, "_elementwise", set())
    own = parameters()
    assert zr.mark_elementwise(Noisy) is Noisy
    assert why_not_elementwise(Noisy(own, lr=0.1), own) is None
    assert why_not_elementwise(type("Noisier", (Noisy,), {})(own, lr=0.1), own) is not None
    with pytest.raises(ValueError, match="wanted is the class of an optimizer"):
        zr.mark_elementwise(Noisy(own, lr=0.1))


def test_only_the_groups_of_the_divided_tensors_count():
    class Mixed(Lion):
        def __init__(self, params, lr, by_norm=False):
            torch.optim.Optimizer.__init__(self, params, {"lr": lr, "by_norm": by_norm})

        def step(self):
            for group in self.param_groups:
                for one in group["params"]:
                    one.data.sub_(one.grad * (one.grad.norm() if group["by_norm"] else 1.0), alpha=group["lr"])

    first, second = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    optimizer = Mixed([{"params": [first], "by_norm": True}, {"params": [second]}], lr=0.1)
    assert why_not_elementwise(optimizer, [second]) is None
    assert why_not_elementwise(optimizer, [first, second]) is not None


def test_a_trial_leaves_parameters_state_and_random_numbers_as_they_were():
    own = parameters()
    optimizer = Noisy(own, lr=0.1)
    before = torch.get_rng_state()
    why_not_elementwise(optimizer, own)
    assert torch.equal(torch.get_rng_state(), before) and not optimizer.state
    assert all(bool((one == 1.0).all()) and one.grad is None for one in own)


class Wrapper:
    """Of somebody else's, such as apex's LARC, which scales by norms."""

    def __init__(self, optim):
        self.optim = optim


def test_wrappers_of_known_hosts_are_seen_through_and_others_are_not(monkeypatch):
    monkeypatch.setattr(independence, "_elementwise", {torch.optim.SGD})
    own = parameters()
    optimizer = torch.optim.SGD(own, lr=0.1)
    assert "it is a wrapper of an optimizer that is not known" in why_not_elementwise(Wrapper(optimizer), own)
    colossalais = type("OptimizerWrapper", (Wrapper,), {"__module__": "colossalai.interface.optimizer"})
    assert why_not_elementwise(colossalais(optimizer), own) is None
    assert why_not_elementwise(colossalais(Lamb(own, lr=0.1)), own) is not None
    zr.mark_elementwise(Wrapper)
    assert why_not_elementwise(Wrapper(optimizer), own) is None
    assert why_not_elementwise(Wrapper(Lamb(own, lr=0.1)), own) is not None


def test_accelerates_wrapper_is_seen_through():
    accelerate = pytest.importorskip("accelerate")
    own = parameters()
    for inner, is_refused in ((torch.optim.AdamW(own), False), (Lamb(own, lr=0.1), True)):
        wrapped = accelerate.optimizer.AcceleratedOptimizer.__new__(accelerate.optimizer.AcceleratedOptimizer)
        wrapped.optimizer = inner
        assert (why_not_elementwise(wrapped, own) is not None) == is_refused


@pytest.mark.parametrize("kind", [Lamb, RowMean, Noisy])
def test_matrices_by_themselves_may_lie_on_different_ranks(kind):
    own = parameters()
    is_refused = kind is Noisy
    assert (why_not_by_parameter(kind(own, lr=0.1), own) is not None) == is_refused


@pytest.mark.parametrize("kind", [AcrossParameters, torch.optim.LBFGS])
def test_what_sees_other_parameters_may_not(kind):
    own = parameters()
    assert "parameter by parameter" in why_not_by_parameter(kind(own, lr=0.1), own)


def test_the_users_word_for_parameters_says_nothing_of_elements(monkeypatch):
    monkeypatch.setattr(independence, "_by_parameter", set())
    own = parameters()
    assert "zeroresize.mark_by_parameter(Noisy)" in why_not_by_parameter(Noisy(own, lr=0.1), own)
    assert zr.mark_by_parameter(Noisy) is Noisy
    assert why_not_by_parameter(Noisy(own, lr=0.1), own) is None
    assert "zeroresize.mark_elementwise(Noisy)" in why_not_elementwise(Noisy(own, lr=0.1), own)
