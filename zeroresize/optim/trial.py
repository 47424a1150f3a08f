"""A trial of an optimizer whose class is not known: two copies of it step small parameters, given other gradients."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroresize.optim.optimizers import states_like
from zeroresize.utils.torch_private import is_private_of_optimizer, leaves_by_path

logger = logging.getLogger(__name__)

#: Gradients of other elements are this much larger in the second copy. Parameters are small, so that rounding hides no
#: small step.
_LR, _VALUES, _FACTOR = 0.05, 0.01, 1e3
#: Of matrices: some optimizers treat small ones, or those that their blocks do not fit, by element.
_SHAPE = (128, 192)
#: Some optimizers begin to look at matrices after some steps.
_NUM_STEPS = 12
#: Bytes for an element where no trial is possible: the two moments of Adam, in float32.
_OF_ADAM = 8.0


class NoTrialError(Exception):
    """Raised where a trial is not possible, or would prove nothing; its text says why."""


class _Like(NamedTuple):
    """A parameter that stands for all ``alike``, which an optimizer cannot tell from it but by their values."""

    tensor: Tensor
    group: int
    is_wanted: bool
    alike: Sequence[Tensor]


class StateBytes:
    """Tells what an optimizer keeps for an element; what it has not stepped yet is tried with one like it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tried: dict[tuple[int, int, torch.dtype], float] = {}

    def of_element(self, tensor: Tensor) -> float:
        """Return the bytes of state of the shape of ``tensor``, which the optimizer steps, for each of its elements."""
        if self._optimizer.state.get(tensor):
            return float(sum(kept.element_size() for kept in states_like(self._optimizer, tensor)))
        groups = [{id(stepped) for stepped in group["params"]} for group in self._optimizer.param_groups]
        key = [id(tensor) in group for group in groups].index(True), min(tensor.dim(), 2), tensor.dtype
        if key not in self._tried:
            self._tried[key] = self._of_trial(tensor)
        return self._tried[key]

    def _of_trial(self, tensor: Tensor) -> float:
        (like,) = (like for like in _likes_of(self._optimizer, [tensor], num_alike=1) if like.is_wanted)
        try:
            ((parameter, state),), _ = _after_steps(self._optimizer, [like], [_drawn(like, 0)[:2]])
        except NoTrialError as error:
            logger.info(
                "memory_limits: %s keeps two numbers of float32 for each parameter, as Adam does, until its first step "
                "tells: %s",
                type(self._optimizer).__name__,
                error,
            )
            return _OF_ADAM
        whole = [kept for kept in state.values() if _is_whole(kept) and kept.shape == parameter.shape]
        return float(sum(kept.element_size() for kept in whole))


def why_steps_differ(optimizer: Optimizer, tensors: Iterable[Tensor], *, by_element: bool) -> str | None:
    """Tell how the step of an element of ``tensors``, or of a tensor, depends on other ones; None where it does not."""
    likes = _likes_of(optimizer, tensors, num_alike=1 if by_element else 2)
    drawn, generator = [_drawn(like, seed) for seed, like in enumerate(likes)], torch.Generator().manual_seed(0)
    if by_element:
        masks = [[(torch.rand(values[0].shape, generator=generator) < 0.5).to(values.device) for values in drawn]]
    else:  # all other tensors, for each
        masks = [
            [torch.full_like(values[0], at != alone, dtype=torch.bool) for at, values in enumerate(drawn)]
            for alone in range(len(likes))
        ]
    for larger in masks if likes else ():
        stepped, numbers = _after_steps(optimizer, likes, drawn)
        changed, other_numbers = _after_steps(optimizer, likes, list(map(_with_larger, drawn, larger)), seed=1)
        for name, number in numbers.items():
            if number != other_numbers.get(name):
                raise NoTrialError(f"in a trial its {name} followed the gradients of other elements")
        for like, mask, (value, state), (other, other_state) in zip(likes, larger, stepped, changed, strict=True):
            shape, is_nan = tuple(mask.shape), value.isnan() & other.isnan()  # half precision may overflow
            is_same = bool(((value == other) | is_nan)[~mask].all())
            if like.is_wanted and by_element:
                is_same = is_same and _numbers_in(state) == _numbers_in(other_state)
                for name, kept in state.items():
                    if _is_whole(kept) and kept.shape != mask.shape:
                        return f"in a trial its state {name} of a tensor {shape} was a tensor {tuple(kept.shape)}"
            if like.is_wanted and not is_same:
                return f"in a trial its steps on a tensor {shape} followed the gradients of other elements"
    return None


def _likes_of(optimizer: Optimizer, tensors: Iterable[Tensor], num_alike: int) -> list[_Like]:
    wanted = {id(tensor) for tensor in tensors}
    kinds = defaultdict[Any, list[Tensor]](list)
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            marks = {name: value for name, value in vars(tensor).items() if isinstance(value, bool | str)}
            key = number, id(tensor) in wanted, tensor.dim() > 1, tensor.dtype, tensor.device, str(marks)
            kinds[key].append(tensor)
    likes = [_Like(tensor, key[0], key[1], alike) for key, alike in kinds.items() for tensor in alike[:num_alike]]
    return likes if any(like.is_wanted for like in likes) else []


def _drawn(like: _Like, seed: int) -> Tensor:
    """Values of a parameter, and its gradients in each step: of different sizes, so that no norm is like another."""
    shape = _SHAPE if like.tensor.dim() > 1 else (_SHAPE[0] * _SHAPE[1],)
    scales = torch.logspace(-2, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
    drawn = torch.randn(_NUM_STEPS + 1, *shape, generator=torch.Generator().manual_seed(seed)) * scales
    drawn[0] *= _VALUES
    return drawn.to(like.tensor.device, like.tensor.dtype)


def _with_larger(drawn: Tensor, mask: Tensor) -> Tensor:
    """With larger gradients of the masked elements, some of another sign."""
    larger = drawn.clone()
    larger[1::2, mask] *= _FACTOR
    larger[2::2, mask] *= -_FACTOR
    return larger


def _after_steps(
    optimizer: Optimizer, likes: Sequence[_Like], drawn: Sequence[Tensor], seed: int = 0
) -> tuple[list[tuple[Tensor, Mapping[str, Any]]], dict[str, float]]:
    """Let a copy of an optimizer step without a trace, from values and by gradients that were ``drawn`` for ``likes``.

    Returned are each parameter with its state, and numbers of the copy's own by name. Copies differ in their ``seed``.
    """
    parameters = [nn.Parameter(values[0].clone()) for values in drawn]
    try:
        _settings_of(optimizer)  # before large tensors would be copied
        devices = [values.device for values in drawn[:1] if values.is_cuda]
        with warnings.catch_warnings(), torch.random.fork_rng(devices), torch.enable_grad():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            made = _copied(optimizer, likes, parameters)
            for gradients in zip(*(values[1:] for values in drawn), strict=True):
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.clone()
                made.step()
        settings = _settings_of(made)
    except NoTrialError:
        raise
    except Exception as error:
        raise NoTrialError(f"a trial of a copy failed ({type(error).__name__}: {error})") from error
    if any(torch.equal(parameter, values[0]) for parameter, values in zip(parameters, drawn, strict=True)):
        raise NoTrialError("in a trial it did not step")
    return [(parameter.detach(), made.state.get(parameter, {})) for parameter in parameters], _numbers_in(settings)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() != 1


def _numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers, also in tensors of one element, by name."""
    kinds = (Real, Tensor)
    return {name: float(value) for name, value in values.items() if isinstance(value, kinds) and not _is_whole(value)}


def _settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """What its groups and attributes hold besides parameters, by where it is."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    leaves = leaves_by_path({"param_groups": groups, **_held(optimizer)})
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
    memo: dict[int, Any] = {id(tensor): parameter for like, parameter in pairs for tensor in like.alike}
    memo |= {id(like.tensor): parameter for like, parameter in pairs} | {id(optimizer): made}
    for like, parameter in pairs:
        vars(parameter).update({name: value for name, value in vars(like.tensor).items() if not callable(value)})
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        settings = copy.deepcopy(settings, memo)
        if "lr" in settings:  # at the start of a warm-up it is zero
            settings["lr"] = torch.full_like(settings["lr"], _LR) if isinstance(settings["lr"], Tensor) else _LR
        groups.append({**settings, "params": [parameter for like, parameter in pairs if like.group == number]})
    held, defaults = copy.deepcopy((_held(optimizer), optimizer.defaults), memo)
    state = defaultdict[Tensor, dict[str, Any]](dict)
    made.__setstate__({**held, "defaults": defaults, "state": state, "param_groups": groups})
    return made
