"""Trials of an optimizer whose class is not known: one like it steps small tensors, whole and in parts."""

from __future__ import annotations

import copy
import enum
import inspect
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class NoTrialError(Exception):
    """Why an optimizer could not be tried."""


@dataclass(frozen=True)
class _Trial:
    rows: int
    columns: int
    num_steps: int
    gradients: float = 1.0  # how much larger


_SEED = 7
#: Small for many steps, since some optimizers begin to look at matrices after some; large for some, since others treat
#: small tensors, or sizes that are no multiples of their blocks, element by element; and with large gradients, since
#: others clip only those.
_TRIALS = (_Trial(10, 6, 24), _Trial(10, 6, 3, 1e5), _Trial(256, 384, 2))
_OTHER_SHAPE = (4, 6)  # of a parameter beside the trial's
_LR = 0.05
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # a trial has its own

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, range, slice),
    *(torch.dtype, torch.device, torch.Size),
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)
_CONTAINERS = (dict, defaultdict, OrderedDict, list, tuple, set, frozenset, deque)
_REDUCES = vars(object)["__reduce_ex__"]  # by what __dict__ holds, unless a class has another
#: Values that are looked at in an attribute at most.
_MOST_VALUES = 10_000


def settings_of(optimizer: Optimizer, tensors: Iterable[Tensor]) -> list[tuple[dict[str, Any], Tensor]]:
    """The settings with which it steps ``tensors``, each once for tensors of equally many dimensions."""
    group_of = {id(one): group for group in optimizer.param_groups for one in group["params"]}
    found: dict[str, tuple[dict[str, Any], Tensor]] = {}
    for tensor in tensors:
        if id(tensor) in group_of:
            group = group_of[id(tensor)]
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            # Trials have a learning rate of their own.
            told = {
                key: value for key, value in settings.items() if not (key.endswith("lr") and isinstance(value, float))
            }
            found.setdefault(f"{min(tensor.dim(), 2)} {tensor.device} {tensor.dtype} {told}", (settings, tensor))
    return list(found.values())


def why_halves_differ(optimizer: Optimizer, settings: Mapping[str, Any], like: Tensor) -> str | None:
    """What steps on a tensor showed that were not, bit for bit, those on its parts; None where all were.

    Raises:
        NoTrialError: where there can be no such steps.
    """
    for trial in _TRIALS:
        rows, columns = trial.rows, trial.columns
        whole = _drawn((rows, columns) if like.dim() > 1 else (rows * columns,), trial, like)
        other = _drawn(_OTHER_SHAPE, trial, like)
        after = _stepped(optimizer, settings, [whole, other])
        for dim in range(whole[0].dim()):
            for size in (2 * whole[0].shape[dim] // 5, 0):  # a rank may have no units
                sizes = size, whole[0].shape[dim] - size
                halves = [[one.split(sizes, dim)[half].clone() for one in whole] for half in (0, 1)]
                parts = [_stepped(optimizer, settings, [half, other]) for half in halves]
                joined = torch.cat([part[0] for part in parts], dim)
                if not torch.equal(joined, after[0]) or not all(torch.equal(part[1], after[1]) for part in parts):
                    shape = tuple(whole[0].shape)
                    return f"in a trial its steps on a tensor {shape} were others than those on its parts {sizes}"
    return None


def why_parameters_differ(optimizer: Optimizer, settings: Mapping[str, Any], like: Tensor) -> str | None:
    """As :func:`why_halves_differ`, of steps on several parameters, and on each by itself."""
    for trial in _TRIALS:
        shapes = (trial.rows, trial.columns), _OTHER_SHAPE
        parameters = [_drawn(shape if like.dim() > 1 else (shape[0],), trial, like) for shape in shapes]
        together = _stepped(optimizer, settings, parameters)
        for one, expected in zip(parameters, together, strict=True):
            (alone,) = _stepped(optimizer, settings, [one])
            if not torch.equal(alone, expected):
                return "in a trial its steps on two parameters were others than those on each by itself"
    return None


def _drawn(shape: Sequence[int], trial: _Trial, like: Tensor) -> list[Tensor]:
    """A parameter's values, and its gradient in each step: of different sizes, so that no norm is like another."""
    generator = torch.Generator().manual_seed(_SEED + len(shape) + shape[0])
    dtype = like.dtype if like.dtype is torch.float64 else torch.float32  # rounding would hide what differs
    scales = torch.logspace(-2, 1, shape[0], dtype=dtype).view(-1, *[1] * (len(shape) - 1))
    drawn = torch.randn(trial.num_steps + 1, *shape, generator=generator, dtype=dtype) * scales
    drawn[1:] *= trial.gradients
    return list(drawn.to(like.device).unbind())


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _stepped(optimizer: Optimizer, settings: Mapping[str, Any], drawn: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The parameters after all steps of an optimizer like ``optimizer``, made anew.

    Raises:
        NoTrialError: if there is none.
    """
    parameters = [nn.Parameter(values.clone()) for values, *_ in drawn]
    devices = [parameters[0].device] if parameters[0].is_cuda else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices), torch.enable_grad(), _on(parameters[0]):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(_SEED)  # torch.manual_seed would seed devices that are not put back
        if devices:
            torch.cuda.manual_seed(_SEED)
        try:
            trial = _made_like(optimizer, settings, parameters)
        except Exception as error:
            told = str(error) if isinstance(error, NoTrialError) else f"{type(error).__name__}: {error}"
            raise NoTrialError(f"none could be made for a trial ({told})") from error
        try:
            for gradients in zip(*(gradients for _, *gradients in drawn), strict=True):
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.clone()
                trial.step()
        except Exception as error:
            shapes = " and ".join(str(tuple(one.shape)) for one in parameters)
            told = f"a trial step on tensors {shapes} failed ({type(error).__name__}: {error})"
            raise NoTrialError(told) from error
    if any(one.numel() and torch.equal(one, values) for one, (values, *_) in zip(parameters, drawn, strict=True)):
        raise NoTrialError("in a trial it did not step")
    return [one.detach() for one in parameters]


def _made_like(optimizer: Optimizer, settings: Mapping[str, Any], parameters: Sequence[nn.Parameter]) -> Optimizer:
    """One of other parameters: with the settings of a group, of the constructor, and of every other attribute.

    Raises:
        NoTrialError: if a setting is unknown, or cannot be copied.
    """
    kind, own = type(optimizer), copy.deepcopy(dict(settings))
    if own.get("lr") is not None:  # at the start of a warm-up it is zero
        own["lr"] = _LR
    held = {name: one for name, one in vars(optimizer).items() if not _is_of_torch(name)}
    holds = {name: set(_kinds_in(one, optimizer)) for name, one in held.items()}
    plain = {name: copy.copy(one) for name, one in held.items() if holds[name] <= {"plain"}}
    known = {name.removeprefix("_"): one for name, one in plain.items()}
    known |= {**plain, **copy.deepcopy(optimizer.defaults), **own}
    wanted = {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[2:]:
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            if name not in known:
                raise NoTrialError(f"its instance does not tell with which {name}= it was made")
            wanted[name] = known[name]
    trial = kind([{**own, "params": list(parameters)}], **wanted)
    trial.defaults = copy.deepcopy(optimizer.defaults)
    memo: dict[int, Any] = {id(optimizer): trial}  # for what is bound to it
    for name, value in held.items():
        made = vars(trial).get(name)
        if value is made:
            continue
        if name in plain:
            setattr(trial, name, copy.deepcopy(value, memo))
        elif "other" in holds[name] or type(made) is not type(value):
            raise NoTrialError(f"its attribute {name} cannot be copied")
    return trial


def _is_of_torch(name: str) -> bool:
    """Whether an attribute is what every optimizer has for its parameters, or a learning rate scheduler's."""
    return name in ("state", "param_groups", "defaults", "step") or name.startswith("_optimizer_")


def _kinds_in(root: Any, optimizer: Optimizer) -> Iterator[str]:
    """What is in an attribute: settings ("plain"), tensors as of parameters or their state, or anything else."""
    to_see, seen = [root], {id(optimizer)}
    while to_see:
        value = to_see.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            yield "plain"
            continue
        seen.add(id(value))
        if len(seen) > _MOST_VALUES:
            yield "other"
            return
        if isinstance(value, Tensor):
            yield "plain" if value.numel() <= 1 and not isinstance(value, nn.Parameter) else "tensors"
        elif type(value) in _CONTAINERS:
            to_see += [*value.keys(), *value.values()] if isinstance(value, dict) else value
        elif isinstance(value, types.MethodType):
            to_see.append(value.__self__)
        elif hasattr(value, "__dict__") and type.__getattribute__(type(value), "__reduce_ex__") is _REDUCES:
            to_see += vars(value).values()
        else:
            yield "other"
