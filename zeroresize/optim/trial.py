"""A trial of an optimizer whose class is not known: copies of it step small parameters, given other gradients."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroresize.utils.torch_private import is_private_of_optimizer, leaves_by_path

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


def why_steps_differ(optimizer: Optimizer, tensors: Iterable[Tensor], *, by_element: bool) -> str | None:
    """Tell how the step of an element of ``tensors``, or of a tensor, depends on other ones; None where it does not.

    Raises:
        NoTrialError: if that cannot be tried.
    """
    likes = _likes_of(optimizer, tensors, num_alike=1 if by_element else 2)
    drawn, generator = _drawn(likes), torch.Generator().manual_seed(0)
    masks = [[(torch.rand(steps[0].shape, generator=generator) < 0.5).to(steps.device) for steps in drawn]]
    if not by_element:  # any two tensors are apart in one of these
        masks = [
            [torch.full_like(steps[0], at >> bit & 1 == value, dtype=torch.bool) for at, steps in enumerate(drawn)]
            for bit, value in itertools.product(range((len(likes) - 1).bit_length()), (0, 1))
        ]
    for larger in masks if likes else ():
        with _undisturbed(drawn[0]):
            expected = _stepped(optimizer, likes, drawn)
            others = _stepped(optimizer, likes, list(map(_with_larger, drawn, larger)))
        for like, mask, (value, state), (other, other_state) in zip(likes, larger, expected, others, strict=True):
            shape, is_same = tuple(value.shape), _same(value[~mask], other[~mask])
            if not like.is_wanted:
                continue
            if by_element:
                odd = [name for name, kept in state.items() if _is_whole(kept) and kept.shape != shape]
                if odd:
                    kept_shape = tuple(state[odd[0]].shape)
                    return f"in a trial its state {odd[0]} of a tensor {shape} was a tensor {kept_shape}"
                is_same = is_same and _numbers_in(state) == _numbers_in(other_state)
            if not is_same:
                return (
                    f"in a trial its steps on a tensor {shape} were others where the gradients of other elements were "
                    f"{_FACTOR:g} times as large"
                )
    return None


def _with_larger(drawn: Tensor, mask: Tensor) -> Tensor:
    """With larger gradients of the masked elements, some of another sign."""
    larger = drawn.clone()
    larger[1::2, mask] *= _FACTOR
    larger[2::2, mask] *= -_FACTOR
    return larger


def state_after_step(optimizer: Optimizer, tensor: Tensor) -> list[Tensor]:
    """Return what an optimizer keeps for a small parameter like ``tensor`` after a step, of the parameter's shape.

    Raises:
        NoTrialError: if a copy of it cannot step.
    """
    likes = [like for like in _likes_of(optimizer, [tensor], num_alike=1) if like.is_wanted]
    with _undisturbed(tensor):
        ((value, state),) = _stepped(optimizer, likes, [one[:2] for one in _drawn(likes)])
    return [kept for kept in state.values() if _is_whole(kept) and kept.shape == value.shape]


def _likes_of(optimizer: Optimizer, tensors: Iterable[Tensor], num_alike: int) -> list[_Like]:
    wanted = {id(one) for one in tensors}
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
        drawn[0] *= _VALUES  # small, so that rounding hides no small step
        all_drawn.append(drawn.to(like.tensor.device, like.tensor.dtype))
    return all_drawn


def _same(tensor: Tensor, other: Tensor) -> bool:
    """Bit for bit; half precision may overflow."""
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() != 1


def _numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers, also in tensors of one element, by name."""
    numbers = {name: value for name, value in values.items() if isinstance(value, Real | Tensor)}
    return {
        name: float(value)
        for name, value in numbers.items()
        if not _is_whole(value) and not isinstance(value, bool | nn.Parameter)
    }


@contextmanager
def _undisturbed(tensor: Tensor) -> Iterator[None]:
    """Let copies step on the device of ``tensor`` without a trace; random numbers differ from copy to copy."""
    devices = [tensor.device] if tensor.is_cuda else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices), torch.enable_grad(), torch.cuda.device_of(tensor):
        warnings.simplefilter("ignore")
        yield


def _stepped(
    optimizer: Optimizer, likes: Sequence[_Like], drawn: Sequence[Tensor]
) -> list[tuple[Tensor, Mapping[str, Any]]]:
    """Let a copy of an optimizer step, and return each parameter and its state.

    Args:
        drawn: [likes] of each its values and the gradients of all steps.

    Raises:
        NoTrialError: if it cannot, keeps tensors elsewhere than in its state, or changes a number of its own.
    """
    parameters = [nn.Parameter(one[0].clone()) for one in drawn]
    num_steps = len(drawn[0]) - 1
    try:
        _settings_of(optimizer)  # before large tensors would be copied
        made = _copied(optimizer, likes, parameters)
        before = _numbers_in(_settings_of(made))
        for step in range(1, num_steps + 1):
            for parameter, values in zip(parameters, drawn, strict=True):
                parameter.grad = values[step].clone()
            made.step()
        after = _numbers_in(_settings_of(made))
    except NoTrialError:
        raise
    except Exception as error:
        raise NoTrialError(f"a trial of a copy failed ({type(error).__name__}: {error})") from error
    for name, number in after.items():
        if number not in (before.get(name), before.get(name, 0.0) + num_steps):
            raise NoTrialError(f"in a trial its {name} changed from {before.get(name)} to {number}")
    if any(torch.equal(one, values[0]) for one, values in zip(parameters, drawn, strict=True)):
        raise NoTrialError("in a trial it did not step")
    return [(one.detach(), made.state.get(one, {})) for one in parameters]


def _settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """What its groups and attributes hold, by where it is."""
    settings = dict(leaves_by_path({"param_groups": optimizer.param_groups, **_held(optimizer)}))
    for where, value in settings.items():
        if _is_whole(value) and not isinstance(value, nn.Parameter):
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
        kept = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        kept = copy.deepcopy(kept, memo)
        if "lr" in kept:  # at the start of a warm-up it is zero
            kept["lr"] = torch.full_like(kept["lr"], _LR) if isinstance(kept["lr"], Tensor) else _LR
        groups.append({**kept, "params": [parameter for like, parameter in pairs if like.group == number]})
    held, defaults = copy.deepcopy((_held(optimizer), optimizer.defaults), memo)
    state = defaultdict[Tensor, dict[str, Any]](dict)
    made.__setstate__({**held, "defaults": defaults, "state": state, "param_groups": groups})
    return made
