"""Optimizers that see more than one element, or one parameter, at once are seen through, and no others."""

import pytest
import torch
from torch import nn

import zeroresize as zr
from zeroresize.optim import independence
from zeroresize.optim.independence import why_not_by_parameter, why_not_elementwise
from zeroresize.optim.optimizers import hook_steps

KNOWN = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


class Steps(torch.optim.Optimizer):
    """Changes each parameter by ``change``; subclasses of one that torch does not have."""

    def __init__(self, params, lr=0.1, **defaults):
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(parameter, parameter.grad, group, self.state[parameter])

    def change(self, parameter, grad, group, state):
        raise NotImplementedError


def stepping(name, change):
    return type(name, (Steps,), {"change": lambda self, *given: change(*given)})


def descending(name, factor):
    """Steps by the gradient times a factor of it."""

    def change(parameter, grad, group, state):
        parameter.sub_(group["lr"] * grad * factor(grad, state))

    return stepping(name, change)


def lion(parameter, grad, group, state):
    moment = state.setdefault("moment", torch.zeros_like(parameter))
    parameter.add_((0.9 * moment + 0.1 * grad).sign(), alpha=-group["lr"])
    moment.lerp_(grad, 0.01)


def later(grad, state):
    state["step"] = state.get("step", 0) + 1
    return grad.norm() if state["step"] > 5 else 1.0


def blocks(grad, state):
    """Of 256 elements, of large tensors only, and where they fit, as 8-bit optimizers have them."""
    if grad.numel() < 4096 or grad.numel() % 256:
        return 1.0
    return torch.cat([part.abs().max().expand(256) for part in grad.flatten().split(256)]).view_as(grad)


def at_least_128(grad, state):
    """By rows and columns of large matrices only; of long vectors here, too."""
    square = grad.square()
    if min(grad.shape) >= 128:
        square = square.mean(-1, keepdim=True) * square.mean(0, keepdim=True)
    return 1 / (square.sqrt() + 1e-8)


def factored(parameter, grad, group, state):
    """As Adafactor keeps its second moments, and steps by them later."""
    row = state.setdefault("row", torch.zeros(parameter.shape[0]))
    row.lerp_(grad.square().flatten(1).mean(1) if grad.dim() > 1 else grad.square(), 0.1)
    parameter.sub_(group["lr"] * grad.sign())


def counted_norm(parameter, grad, group, state):
    state["norm"] = float(grad.norm())
    parameter.sub_(group["lr"] * grad.sign())


def cautious(parameter, grad, group, state):
    """Steps where moment and gradient agree, and the more the fewer do."""
    moment = state.setdefault("moment", torch.zeros_like(parameter)).lerp_(grad, 0.1)
    mask = (moment * grad > 0).to(grad.dtype)
    parameter.sub_(group["lr"] * moment.sign() * mask / mask.mean().clamp_min(1e-3))


Lion = stepping("Lion", lion)
Lamb = stepping("Lamb", lambda p, g, group, state: p.sub_(g * p.norm() / (g.norm() + 1e-6), alpha=group["lr"]))
RowMean = descending("RowMean", lambda grad, state: 1 / (grad.square().mean(-1, keepdim=True).sqrt() + 1e-6))
Noisy = stepping("Noisy", lambda p, g, group, state: p.sub_(group["lr"] * (g + torch.randn_like(g))))


class AcrossParameters(Steps):
    """By the norm of all gradients; or only where that is large."""

    is_clipping = False

    @torch.no_grad()
    def step(self):
        gradients = [each.grad for each in self.param_groups[0]["params"]]
        norm = torch.stack([grad.norm() for grad in gradients]).norm()
        for parameter, grad in zip(self.param_groups[0]["params"], gradients, strict=True):
            parameter.sub_(0.1 * grad * (torch.clamp(1e3 / norm, max=1.0) if self.is_clipping else norm))


class ClipsAt1000(AcrossParameters):
    is_clipping = True


def parameters(dtype=torch.float32, shapes=((6, 5), (7,))):
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


SEEN = [
    *(Lamb, RowMean, Noisy, AcrossParameters, ClipsAt1000),
    *(descending("Later", later), descending("Blocks", blocks), descending("AtLeast128", at_least_128)),
]


def test_what_sees_more_than_an_element_is_refused_and_what_sees_more_than_a_parameter():
    for kind in SEEN:
        for dtype in (torch.float32, torch.bfloat16):
            params = parameters(dtype)
            reason = why_not_elementwise(kind(params, lr=1e-9), params)
            assert f"{kind.__name__} is not element-wise: in a trial its steps on a tensor" in reason
            assert "mark_elementwise" not in reason  # what was seen to be so is nothing to give one's word for
    for kind in (Lamb, RowMean, Noisy, AcrossParameters, ClipsAt1000, torch.optim.LBFGS):
        params = parameters()
        reason = why_not_by_parameter(kind(params, lr=0.1), params)
        assert reason is None if kind in (Lamb, RowMean) else "parameter by parameter" in reason, kind
    expected = {
        factored: "its state row of a tensor (128, 192) was a tensor (128,)",
        counted_norm: "followed the gradients of other elements",
        cautious: "its steps on a tensor",
    }
    params = parameters(shapes=[(6, 5)])
    for change, reason in expected.items():
        assert reason in why_not_elementwise(stepping("Other", change)(params), params)
    for name in ("Muon", "Adafactor", "LBFGS"):
        assert why_not_elementwise(getattr(torch.optim, name)(params, lr=0.1), params) is not None


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_element_wise_optimizers_pass_a_trial_too(monkeypatch, dtype):
    monkeypatch.setattr(independence, "_known", set())
    for kind in [*(getattr(torch.optim, name) for name in KNOWN), Lion, type("Own", (torch.optim.AdamW,), {})]:
        options = {"lr": 0.1} if kind is Lion else {"lr": 0.0, "foreach": True}  # as a warm-up begins
        params = parameters(dtype, ((6, 5), (7,), (3, 4, 2)))
        optimizer = kind([{"params": params[:1]}, {"params": params[1:], "lr": 0.0}], **options)
        assert why_not_elementwise(optimizer, params) is None, kind
        assert why_not_by_parameter(optimizer, params) is None, kind


class Lazy(Steps):
    def step(self):
        pass


class Totals(Lion):
    """Keeps the norm of all gradients, and steps by it from some size on alone."""

    def step(self):
        self.total = sum(float(each.grad.norm()) for each in self.param_groups[0]["params"])
        super().step()


class Kept(Steps):
    """SGD with momentum that is kept where ``where`` says."""

    def __init__(self, params, where):
        super().__init__(params)
        self.where, self.kept = where, {}

    def change(self, parameter, grad, group, state):
        place = {"attribute": self.kept, "group": group.setdefault("kept", {}), "state": state}[self.where]
        key = "momentum" if self.where == "state" else len(parameter)
        parameter.sub_(place.setdefault(key, torch.zeros_like(parameter)).mul_(0.9).add_(grad), alpha=group["lr"])


def test_what_cannot_be_tried_is_refused_with_the_reason():
    refused = [
        (lambda params: Lazy(params), "in a trial it did not step"),
        (lambda params: Totals(params), "in a trial its total followed the gradients of other elements"),
        (lambda params: Kept(params, "attribute"), "it kept tensors in kept"),
        (lambda params: Kept(params, "group"), "it kept tensors in param_groups[0]['kept']"),
    ]
    for make, expected in refused:
        for why_not, call in ((why_not_elementwise, "mark_elementwise"), (why_not_by_parameter, "mark_by_parameter")):
            params = parameters()
            reason = why_not(make(params), params)
            assert expected in reason and f"say so by zeroresize.{call}(" in reason
    params = parameters()
    assert why_not_elementwise(Kept(params, "state"), params) is None


def test_only_the_groups_of_the_divided_tensors_count():
    def change(parameter, grad, group, state):
        parameter.sub_(grad * (grad.norm() if group["by_norm"] else 1.0), alpha=group["lr"])

    first, second = parameters(shapes=((3, 2), (3, 2)))
    groups = [{"params": [first], "by_norm": True}, {"params": [second]}]
    optimizer = stepping("Mixed", change)(groups, by_norm=False)
    assert why_not_elementwise(optimizer, [second]) is None
    assert why_not_elementwise(optimizer, [first, second]) is not None


def test_a_trial_leaves_parameters_state_and_random_numbers_as_they_were_whatever_they_are():
    params = parameters(shapes=[(6, 5)])
    before = torch.get_rng_state()
    for kind, is_refused in ((Noisy, True), (Lion, False)):
        optimizer = kind(params)
        for has_stepped in (False, True):
            assert bool(optimizer.state) is has_stepped
            held = [one.clone() for one in (params[0], *(optimizer.state[params[0]].values() if has_stepped else ()))]
            assert (why_not_elementwise(optimizer, params) is not None) is is_refused
            now = (params[0], *(optimizer.state[params[0]].values() if has_stepped else ()))
            assert all(map(torch.equal, held, now)) and bool(optimizer.state) is has_stepped
            assert torch.equal(torch.get_rng_state(), before)
            params[0].grad = torch.ones(6, 5)
            optimizer.step()
            params[0].grad = None
            before = torch.get_rng_state()


# ---- the user's word, and wrappers -----------------------------------------------------------------------------------


def test_the_users_word_counts_for_that_class_alone(monkeypatch):
    monkeypatch.setattr(independence, "_elementwise", set())
    monkeypatch.setattr(independence, "_by_parameter", set())
    params = parameters()
    assert zr.mark_by_parameter(Noisy) is Noisy
    assert why_not_by_parameter(Noisy(params), params) is None
    assert "Noisy is not element-wise" in why_not_elementwise(Noisy(params), params)
    assert zr.mark_elementwise(Noisy) is Noisy
    assert why_not_elementwise(Noisy(params), params) is None
    assert why_not_elementwise(type("Noisier", (Noisy,), {})(params), params) is not None
    with pytest.raises(ValueError, match="wanted is the class of an optimizer"):
        zr.mark_elementwise(Noisy(params))


class Wrapper:
    """Of somebody else's, such as apex's LARC, which scales by norms."""

    def __init__(self, optim):
        self.optim = self.optimizer = optim


def test_wrappers_of_known_hosts_are_seen_through_and_others_are_not(monkeypatch):
    monkeypatch.setattr(independence, "_elementwise", {torch.optim.SGD})
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    assert "it is a wrapper of an optimizer that is not known" in why_not_elementwise(Wrapper(optimizer), params)
    assert "it is no torch.optim.Optimizer and holds none" in why_not_elementwise(object(), params)
    hosts = "colossalai.interface.optimizer", "accelerate.optimizer"
    for kind in (type("OptimizerWrapper", (Wrapper,), {"__module__": host}) for host in hosts):
        assert why_not_elementwise(kind(optimizer), params) is None
        assert why_not_elementwise(kind(Lamb(params)), params) is not None
    zr.mark_elementwise(Wrapper)
    assert why_not_elementwise(Wrapper(optimizer), params) is None
    assert why_not_elementwise(Wrapper(Lamb(params)), params) is not None


# ---- what an optimizer knows of its settings, and of single parameters -----------------------------------------------


def test_schedulers_profilers_and_balancers_may_hang_on_an_instance():
    params = parameters()
    optimizer = Lion(params, lr=0.1)
    for _ in range(2):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    hook_steps(optimizer, Lazy(params).step, Lazy(params).step)
    optimizer.register_step_post_hook(torch.profiler._optimizer_post_hook)
    assert "step" in vars(optimizer) and why_not_elementwise(optimizer, params) is None


class ByNorm(Steps):
    """By the norm of a matrix, or of all of them, where ``sees`` says so; else as SGD."""

    together = False

    @torch.no_grad()
    def step(self):
        params = self.param_groups[0]["params"]
        seen = [id(each) for each in params if self.sees(each)]
        norms = {id(each): each.grad.float().norm() for each in params}
        of_all = torch.stack([norms[key] for key in seen] or [torch.ones(())]).norm()
        for each in params:
            norm = 1.0 if id(each) not in seen else of_all if self.together else norms[id(each)]
            each.sub_((0.1 * each.grad / (norm + 1e-8)).to(each.dtype))


SEES = {
    "ByMark": lambda self, one: getattr(one, "use_muon", False),
    "ByDtype": lambda self, one: one.dtype == torch.bfloat16,
    "ByMarkAndSize": lambda self, one: getattr(one, "use_muon", False) and min(one.shape) >= 128,
}


def test_matrices_that_are_told_by_what_is_at_a_parameter_are_found():
    for name, sees in SEES.items():
        kind = type(name, (ByNorm,), {"sees": sees})
        for is_seen in (True, False):
            dtype = torch.bfloat16 if name == "ByDtype" and is_seen else torch.float32
            params = parameters(dtype, [(6, 5)] * 4)
            for parameter in params[1:3]:
                parameter.use_muon = is_seen
            optimizer = kind(params)
            reason = why_not_elementwise(optimizer, params)
            assert f"{name} is not element-wise: in a trial" in reason if is_seen else reason is None
            assert why_not_by_parameter(optimizer, params) is None
            optimizer.together = True
            assert (why_not_by_parameter(optimizer, params) is not None) == is_seen
