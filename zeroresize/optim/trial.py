"""A trial of an optimizer whose class is not known: two copies of it step small parameters, given other gradients."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroresize.utils.torch_private import is_private_of_optimizer, leaves_by_path

#: Gradients of other elements are this much larger in the second copy. Parameters are small, so that rounding hides no
#: small step.
_LR, _VALUES, _FACTOR = 0.05, 0.01, 1e3
#: Of matrices: some optimizers treat small ones, or those that their blocks do not fit, by element.
_SHAPE = (128, 192)
#: Some optimizers begin to look at matrices after some steps.
_NUM_STEPS = 12


class NoTrialError(Exception):
    """Raised where a trial is not possible, or would prove nothing; its text says why."""


class _Like(NamedTuple):
    """A parameter that stands for all ``alike``, which an optimizer cannot tell from it but by their values."""

    tensor: Tensor
    group: int
    is_wanted: bool
    alike: Sequence[Tensor]


class _Stepped(NamedTuple):
    """What a copy holds after its steps: parameters, each with its state, and numbers of its own by name."""

    parameters: list[nn.Parameter]
    states: list[Mapping[str, Any]]
    numbers: Mapping[str, float]


def why_steps_differ(optimizer: Optimizer, tensors: Iterable[Tensor], *, by_element: bool) -> str | None:
    """Tell how the step of an element of ``tensors``, or of a tensor, depends on other ones; None where it does not.

    Raises:
        NoTrialError: if that cannot be tried.
    """
    likes = _likes_of(optimizer, tensors, num_alike=1 if by_element else 2)
    drawn, generator = _drawn(likes), torch.Generator().manual_seed(0)
    if by_element:
        masks = [[(torch.rand(steps[0].shape, generator=generator) < 0.5).to(steps.device) for steps in drawn]]
    else:  # all other tensors, for each
        masks = [
            [torch.full_like(steps[0], at != alone, dtype=torch.bool) for at, steps in enumerate(drawn)]
            for alone in range(len(likes))
        ]
    for larger in masks if likes else ():
        expected, others = _stepped(optimizer, likes, drawn, list(map(_with_larger, drawn, larger)))
        for name, number in expected.numbers.items():
            if number != others.numbers.get(name):
                raise NoTrialError(f"in a trial its {name} followed the gradients of other elements")
        for at, (like, mask) in enumerate(zip(likes, larger, strict=True)):
            if like.is_wanted and (why := _why_differs(at, mask, expected, others, by_element=by_element)) is not None:
                return why
    return None


def state_after_step(optimizer: Optimizer, tensor: Tensor) -> list[Tensor]:
    """Return what an optimizer keeps for a small parameter like ``tensor`` after a step, of the parameter's shape.

    Raises:
        NoTrialError: if a copy of it cannot step.
    """
    likes = [like for like in _likes_of(optimizer, [tensor], num_alike=1) if like.is_wanted]
    ((parameters, states, _),) = _stepped(optimizer, likes, [steps[:2] for steps in _drawn(likes)])
    return [kept for kept in states[0].values() if _is_whole(kept) and kept.shape == parameters[0].shape]


def _why_differs(at: int, mask: Tensor, expected: _Stepped, others: _Stepped, *, by_element: bool) -> str | None:
    value, other = expected.parameters[at].detach()[~mask], others.parameters[at].detach()[~mask]
    shape, state = tuple(mask.shape), expected.states[at]
    is_same = bool(((value == other) | (value.isnan() & other.isnan())).all())  # half precision may overflow
    if by_element:
        for name, kept in state.items():
            if _is_whole(kept) and kept.shape != mask.shape:
                return f"in a trial its state {name} of a tensor {shape} was a tensor {tuple(kept.shape)}"
        is_same = is_same and _numbers_in(state) == _numbers_in(others.states[at])
    if is_same:
        return None
    return (
        f"in a trial its steps on a tensor {shape} were others where the gradients of other elements were "
        f"{_FACTOR:g} times as large"
    )


def _likes_of(optimizer: Optimizer, tensors: Iterable[Tensor], num_alike: int) -> list[_Like]:
    wanted = {id(tensor) for tensor in tensors}
    kinds = defaultdict[Any, list[Tensor]](list)
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            marks = {name: value for name, value in vars(tensor).items() if isinstance(value, bool | str)}
            key = number, id(tensor) in wanted, tensor.dim() > 1, tensor.dtype, tensor.device, str(marks)
            kinds[key].append(tensor)
    likes = [_Like(one, key[0], key[1], alike) for key, alike in kinds.items() for one in alike[:num_alike]]
    return likes if any(like.is_wanted for like in likes) else []


def _drawn(likes: Sequence[_Like]) -> list[Tensor]:
    """Values of parameters, and their gradients in each step: of different sizes, so that no norm is like another."""
    all_drawn = []
    for seed, like in enumerate(likes):
        shape = _SHAPE if like.tensor.dim() > 1 else (_SHAPE[0] * _SHAPE[1],)
        scales = torch.logspace(-2, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
        drawn = torch.randn(_NUM_STEPS + 1, *shape, generator=torch.Generator().manual_seed(seed)) * scales
        drawn[0] *= _VALUES
        all_drawn.append(drawn.to(like.tensor.device, like.tensor.dtype))
    return all_drawn


def _with_larger(drawn: Tensor, mask: Tensor) -> Tensor:
    """With larger gradients of the masked elements, some of another sign."""
    larger = drawn.clone()
    larger[1::2, mask] *= _FACTOR
    larger[2::2, mask] *= -_FACTOR
    return larger


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() != 1


def _numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers, also in tensors of one element, by name."""
    kinds = (Real, Tensor)
    return {name: float(one) for name, one in values.items() if isinstance(one, kinds) and not _is_whole(one)}


def _stepped(optimizer: Optimizer, likes: Sequence[_Like], *drawn: Sequence[Tensor]) -> list[_Stepped]:
    """Let copies of an optimizer step without a trace; random numbers differ from copy to copy.

    Args:
        drawn: for each copy, [likes] of each its values and the gradients of all steps.

    Raises:
        NoTrialError: if one cannot, or keeps tensors elsewhere than in its state.
    """
    devices = [steps.device for steps in drawn[0][:1] if steps.is_cuda]
    try:
        _settings_of(optimizer)  # before large tensors would be copied
        with warnings.catch_warnings(), torch.random.fork_rng(devices), torch.enable_grad():
            warnings.simplefilter("ignore")
            return [_step_copy(optimizer, likes, of_copy) for of_copy in drawn]
    except NoTrialError:
        raise
    except Exception as error:
        raise NoTrialError(f"a trial of a copy failed ({type(error).__name__}: {error})") from error


def _step_copy(optimizer: Optimizer, likes: Sequence[_Like], drawn: Sequence[Tensor]) -> _Stepped:
    parameters = [nn.Parameter(steps[0].clone()) for steps in drawn]
    made = _copied(optimizer, likes, parameters)
    for step in range(1, len(drawn[0])):
        for parameter, values in zip(parameters, drawn, strict=True):
            parameter.grad = values[step].clone()
        made.step()
    if any(torch.equal(one, values[0]) for one, values in zip(parameters, drawn, strict=True)):
        raise NoTrialError("in a trial it did not step")
    return _Stepped(parameters, [made.state.get(one, {}) for one in parameters], _numbers_in(_settings_of(made)))


def _settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """What its groups and attributes hold besides parameters, by where it is."""
    leaves = leaves_by_path({"param_groups": optimizer.param_groups, **_held(optimizer)})
    settings = {where: value for where, value in leaves if not isinstance(value, nn.Parameter)}
    for where, value in settings.items():
        if _is_whole(value):
            raise NoTrialError(f"it kept tensors in {where}, and only what is in its state, by parameter, moves along")
    return settings


def _held(optimizer: Optimizer) -> dict[str, Any]:
    """Attributes besides those that every optimizer has, and those of learning rate schedulers."""
    names = vars(optimizer).keys() - {"state", "param_groups", "defaults", "step"}
    return {name: vars(optimizer)[name] for name in sorted(names) if not is_private_of_optimizer(name)}


def _copied(optimizer: Optimizer, likes: Sequence[_Like], parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Copy an optimizer with all that it holds but its state; parameters stand for those of ``likes``."""
    made = type(optimizer).__new__(type(optimizer))
    pairs = list(zip(likes, parameters, strict=True))
    memo: dict[int, Any] = {id(one): parameter for like, parameter in pairs for one in like.alike}
    memo |= {id(like.tensor): parameter for like, parameter in pairs} | {id(optimizer): made}
    for like, parameter in pairs:
        vars(parameter).update({name: value for name, value in vars(like.tensor).items() if not callable(value)})
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        kept = copy.deepcopy({name: one for name, one in group.items() if name not in ("params", "param_names")}, memo)
        if "lr" in kept:  # at the start of a warm-up it is zero
            kept["lr"] = torch.full_like(kept["lr"], _LR) if isinstance(kept["lr"], Tensor) else _LR
        groups.append({**kept, "params": [parameter for like, parameter in pairs if like.group == number]})
    held, defaults = copy.deepcopy((_held(optimizer), optimizer.defaults), memo)
    state = defaultdict[Tensor, dict[str, Any]](dict)
    made.__setstate__({**held, "defaults": defaults, "state": state, "param_groups": groups})
    return made
