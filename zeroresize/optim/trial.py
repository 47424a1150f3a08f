"""A trial of an optimizer whose class is not known: a copy of it steps small parameters, beside others and in parts."""

from __future__ import annotations

import io
import itertools
import pickle
import re
import types
import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroresize.utils.torch_private import is_private_of_optimizer

_SEED, _LR, _VALUES, _FACTOR = 7, 0.05, 0.01, 1e3
_PLAIN = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, torch.dtype, torch.device)
#: Whose objects at parameters say how these are divided; a trial's have the very same.
_DIVIDING = ("torch", "colossalai", "zeroresize")


class NoTrialError(Exception):
    """Raised where a trial is not possible, or would prove nothing; its text says why."""


#: Rows, columns, steps, and sizes of a first part of each dimension. Many steps, since some optimizers begin to look at
#: matrices after some, and a part without rows, as a rank may have no units; and a large matrix, as others treat small
#: ones, or those that do not fit their blocks, by element. All parts fill vector registers, also in half precision, and
#: one thread's share, as torch rounds what is left over in another way.
_SIZES = ((64, 96, 24, (32, 0)), (128, 192, 2, (64,)))


@dataclass(frozen=True)
class _Like:
    """A parameter that stands for all that an optimizer cannot tell from it, but for their values."""

    tensor: Tensor
    group: int
    name: str
    flags: Mapping[str, Any]  # that its state holds before the first step
    is_wanted: bool
    alike: Sequence[Tensor] = ()  # all of its kind

    @property
    def kind(self) -> tuple[object, ...]:
        marks = {
            name: value if isinstance(value, bool | str) else type(value) for name, value in vars(self.tensor).items()
        }
        text = re.sub(r"\d+", "#", f"{self.name} {sorted(marks.items(), key=str)} {self.flags}")
        return self.group, self.tensor.dim() > 1, self.tensor.dtype, self.tensor.device, self.is_wanted, text


def why_elements_differ(optimizer: Optimizer, tensors: Iterable[Tensor]) -> str | None:
    """Tell how the step of an element of ``tensors`` depends on other elements; None where it does not.

    Raises:
        NoTrialError: if that cannot be tried.
    """
    likes = _likes_of(optimizer, tensors, num_alike=1)
    for rows, columns, num_steps, firsts in _SIZES if likes else ():
        drawn = _drawn(likes, rows, columns, num_steps)
        whole, scaled = _stepped(optimizer, likes, drawn), _stepped(optimizer, likes, list(map(_scaled, drawn)))
        for like, after, other in zip(likes, whole, scaled, strict=True):
            shape, others = tuple(after.value.shape), ~_every_other(after.value)
            if not like.is_wanted:
                continue
            for name, kept in after.state.items():
                if isinstance(kept, Tensor) and kept.numel() != 1 and kept.shape != shape:
                    return f"in a trial its state {name} of a tensor {shape} was a tensor {tuple(kept.shape)}"
            is_same = _same(after.value[others], other.value[others])
            if not is_same or _numbers_in(after.state) != _numbers_in(other.state):
                return (
                    f"in a trial its steps on a tensor {shape} were others in some elements where the gradients of "
                    f"other elements were {_FACTOR:g} times as large"
                )
        for dim, first in itertools.product((0, 1), firsts):
            for part in (slice(0, first), slice(first, None)):
                is_cut = [like.is_wanted and dim < one.value.dim() for like, one in zip(likes, whole, strict=True)]
                reason = _why_others(optimizer, likes, drawn, whole, is_cut, (slice(None),) * dim + (part,))
                if reason is not None:
                    return reason
    return None


def why_parameters_differ(optimizer: Optimizer, tensors: Iterable[Tensor]) -> str | None:
    """Tell how the step of a tensor depends on other ones, as :func:`why_elements_differ`."""
    likes = _likes_of(optimizer, tensors, num_alike=2)
    for rows, columns, num_steps, _ in _SIZES if likes else ():
        drawn = list(
            map(_scaled, _drawn(likes, rows, columns, num_steps))
        )  # large, since some see others in clipping alone
        together = _stepped(optimizer, likes, drawn)
        for bit, value in itertools.product(range((len(likes) - 1).bit_length()), (0, 1)):
            # Any two are apart in one of these.
            is_cut = [at >> bit & 1 == value for at in range(len(likes))]
            reason = _why_others(optimizer, likes, drawn, together, is_cut, (slice(0, rows // 2),), is_whole=True)
            if reason is not None:
                return reason
    return None


def _why_others(
    optimizer: Optimizer,
    likes: Sequence[_Like],
    drawn: Sequence[Tensor],
    expected: Sequence[_Stepped],
    is_cut: Sequence[bool],
    part: tuple[slice, ...],
    *,
    is_whole: bool = False,
) -> str | None:
    """Tell how steps are others where some tensors are cut: on their part, unless ``is_whole``, or on the others."""
    given = [one[(slice(None), *part)] if cut else one for one, cut in zip(drawn, is_cut, strict=True)]
    for after, other, cut in zip(expected, _stepped(optimizer, likes, given), is_cut, strict=True):
        value, shape = after.value, tuple(after.value.shape)
        if cut and not is_whole and not _same(value[part], other.value):
            return f"in a trial its steps on a tensor {shape} were others than on its part {tuple(other.value.shape)}"
        if not cut and not _same(value, other.value):
            return f"in a trial its steps on a tensor {shape} were others beside smaller tensors"
    return None


def state_after_step(optimizer: Optimizer, tensor: Tensor) -> list[Tensor]:
    """Return what an optimizer keeps for a small parameter like ``tensor`` after a step, of the parameter's shape.

    Raises:
        NoTrialError: if a copy of it cannot step.
    """
    likes = [like for like in _likes_of(optimizer, [tensor], num_alike=1) if like.is_wanted]
    (stepped,) = _stepped(optimizer, likes, _drawn(likes, 64, 64, 1))
    kept = [one for one in stepped.state.values() if isinstance(one, Tensor)]
    return [one for one in kept if one.shape == stepped.value.shape]


def _likes_of(optimizer: Optimizer, tensors: Iterable[Tensor], num_alike: int) -> list[_Like]:
    wanted = {id(one) for one in tensors}
    kinds = defaultdict[object, tuple[list[_Like], list[Tensor]]](lambda: ([], []))
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [""] * len(group["params"])
        for tensor, name in zip(group["params"], names, strict=True):
            state = optimizer.state.get(tensor, {})
            flags = {key: value for key, value in state.items() if isinstance(value, bool | str)}
            like = _Like(tensor, number, name, flags, id(tensor) in wanted)
            likes, alike = kinds[like.kind]
            likes.append(replace(like, alike=alike))
            alike.append(tensor)
    chosen = [like for likes, _ in kinds.values() for like in likes[:num_alike]]
    return chosen if any(like.is_wanted for like in chosen) else []


def _same(tensor: Tensor, other: Tensor) -> bool:
    """Bit for bit; half precision may overflow."""
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


class _Stepped(NamedTuple):
    """A parameter after some steps, and its state."""

    value: Tensor
    state: Mapping[str, Any]


def _stepped(optimizer: Optimizer, likes: Sequence[_Like], drawn: Sequence[Tensor]) -> list[_Stepped]:
    """Let a copy of an optimizer step.

    Args:
        drawn: [likes] of each its values and the gradients of all steps.

    Raises:
        NoTrialError: if it cannot, or keeps something elsewhere than in the state of parameters.
    """
    parameters = [nn.Parameter(one[0].clone()) for one in drawn]
    with _undisturbed(drawn[0]):
        try:
            made = _copied(optimizer, likes, parameters)
            before = _numbers_of(made)
            for gradients in zip(*(one[1:] for one in drawn), strict=True):
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.clone()
                made.step()
        except NoTrialError:
            raise
        except Exception as error:
            shapes = " and ".join(str(tuple(one.shape)) for one in parameters)
            raise NoTrialError(f"a trial step on tensors {shapes} failed ({type(error).__name__}: {error})") from error
        _require_state_only(made)
    num_steps = len(drawn[0]) - 1
    for name, number in _numbers_of(made).items():
        if number not in (before.get(name), before.get(name, 0.0) + num_steps):
            raise NoTrialError(f"in a trial its number {name} changed from {before.get(name)} to {number}")
    if any(one.numel() and torch.equal(one, values[0]) for one, values in zip(parameters, drawn, strict=True)):
        raise NoTrialError("in a trial it did not step")
    return [_Stepped(one.detach(), made.state.get(one, {})) for one in parameters]


def _drawn(likes: Sequence[_Like], rows: int, columns: int, num_steps: int) -> list[Tensor]:
    """Values of parameters, and their gradients in each step: of different sizes, so that no norm is like another."""
    all_drawn = []
    for at, like in enumerate(likes):
        shape = (rows, columns) if like.tensor.dim() > 1 else (rows * columns,)
        generator = torch.Generator().manual_seed(_SEED + at)
        scales = torch.logspace(-2, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
        drawn = torch.randn(num_steps + 1, *shape, generator=generator) * scales
        drawn[0] *= _VALUES  # small, so that rounding hides no small step
        all_drawn.append(drawn.to(like.tensor.device, like.tensor.dtype))
    return all_drawn


def _scaled(drawn: Tensor) -> Tensor:
    """With other values, and larger gradients of another sign, in every other element."""
    scaled, others = drawn.clone(), _every_other(drawn[0])
    for step, values in enumerate(scaled):
        values[others] *= (_FACTOR if step % 2 else -_FACTOR) if step else -3.0
    return scaled


def _every_other(tensor: Tensor) -> Tensor:
    """As on a chessboard."""
    places = [torch.arange(size).view(-1, *[1] * (tensor.dim() - 1 - dim)) for dim, size in enumerate(tensor.shape)]
    return (sum(places, torch.zeros((), dtype=torch.int64)) % 2 == 1).to(tensor.device)


@contextmanager
def _undisturbed(tensor: Tensor) -> Iterator[None]:
    """Let a copy step on the device of ``tensor`` without a trace; random numbers begin alike in every trial."""
    on_device = torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
    devices = [tensor.device] if tensor.is_cuda else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices), torch.enable_grad(), on_device:
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(_SEED)  # torch.manual_seed would seed devices that are not put back
        if tensor.is_cuda:
            torch.cuda.manual_seed(_SEED)
        yield


def _numbers_in(values: Mapping[Any, Any], seen: dict[int, Any] | None = None) -> dict[str, float]:
    """Its numbers by name, also in tensors of one element, arrays, and whatever holds them, at any depth."""
    numbers: dict[str, float] = {}
    seen = {} if seen is None else seen  # what was seen itself, so that no id is another's later
    for name, value in values.items():
        if isinstance(value, (bool, str, bytes, nn.Parameter, *_PLAIN)):
            continue
        if isinstance(value, Real):
            numbers[str(name)] = float(value)
        elif id(value) not in seen:
            seen[id(value)] = value
            inner = _numbers_in(_parts_of(value), seen)
            numbers |= {f"{name}.{part}".rstrip("."): number for part, number in inner.items()}
    return numbers


def _parts_of(value: Any) -> Mapping[str, Any]:
    """What something holds, by name or place."""
    if isinstance(value, Tensor):
        return {"": value.item()} if value.numel() == 1 else {}
    if isinstance(value, np.ndarray | np.generic):
        value = value.reshape(-1).tolist()
    if isinstance(value, list | tuple | deque):
        return {str(at): part for at, part in enumerate(value)}
    if isinstance(value, Mapping):  # keys may be parameters, which are long to print
        return {key if isinstance(key, str) else f"key {at}": part for at, (key, part) in enumerate(value.items())}
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}


def _numbers_of(optimizer: Optimizer) -> dict[str, float]:
    numbers = _numbers_in(_held(optimizer))
    for at, group in enumerate(optimizer.param_groups):
        numbers |= {f"{name} of group {at}": number for name, number in _numbers_in(group).items()}
    return numbers


def _held(optimizer: Optimizer) -> dict[str, Any]:
    """Attributes besides those that every optimizer has, and those of learning rate schedulers."""
    names = vars(optimizer).keys() - {"state", "param_groups", "defaults", "step"}
    return {name: vars(optimizer)[name] for name in sorted(names) if not is_private_of_optimizer(name)}


def _copied(optimizer: Optimizer, likes: Sequence[_Like], parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Copy an optimizer with all that it holds but its state; parameters stand for those of ``likes``.

    Raises:
        NoTrialError: if something cannot be copied, or is a tensor, which no move would take along.
    """
    made = type(optimizer).__new__(type(optimizer))
    replaced: dict[int, Any] = {id(optimizer): made}
    for like, parameter in zip(likes, parameters, strict=True):
        replaced |= {id(one): parameter for one in like.alike if id(one) not in replaced} | {id(like.tensor): parameter}
    groups, state = [], defaultdict[Tensor, dict[str, Any]](dict)
    for number, group in enumerate(optimizer.param_groups):
        kept = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        kept = {name: _copy(value, replaced, f"the setting {name} of a group") for name, value in kept.items()}
        lr = kept.get("lr")
        if isinstance(lr, int | float | Tensor):  # at the start of a warm-up it is zero
            kept["lr"] = torch.full_like(lr, _LR) if isinstance(lr, Tensor) else _LR
        here = [at for at, like in enumerate(likes) if like.group == number]
        names = {"param_names": [likes[at].name for at in here]} if "param_names" in group else {}
        groups.append({**kept, **names, "params": [parameters[at] for at in here]})
    for like, parameter in zip(likes, parameters, strict=True):
        for name, value in vars(like.tensor).items():
            vars(parameter)[name] = _copy(value, replaced, f"the attribute {name} of its parameters", _DIVIDING)
        if like.flags:
            state[parameter].update(like.flags)
    held = {name: _copy(value, replaced, f"its attribute {name}") for name, value in _held(optimizer).items()}
    defaults = _copy(optimizer.defaults, replaced, "its defaults")
    made.__setstate__({**held, "defaults": defaults, "state": state, "param_groups": groups})
    return made


def _require_state_only(optimizer: Optimizer) -> None:
    """Check that an optimizer that has stepped keeps tensors nowhere but in its state."""
    known = {id(one): one for group in optimizer.param_groups for one in group["params"]}
    known[id(optimizer)] = optimizer
    if any(id(one) not in known for one in optimizer.state):
        raise NoTrialError("it kept state that is no parameter's, and only that of parameters moves along")
    for name, value in _held(optimizer).items():
        _copy(value, known, f"its attribute {name}")
    for group in optimizer.param_groups:
        for name, value in group.items():
            _copy(value, known, f"the setting {name} of a group")


def _copy(value: Any, replaced: Mapping[int, Any], where: str, shared: Sequence[str] = ()) -> Any:
    """Copy what is found at a place; objects of the packages ``shared`` are the very same."""
    file, known = io.BytesIO(), list[Any]()
    pickler = pickle.Pickler(file)

    def persistent_id(part: Any) -> int | None:
        if type(part) is int and part in replaced:  # by their id() some know parameters
            part = id(replaced[part])
        elif id(part) in replaced:
            part = replaced[id(part)]
        elif isinstance(part, Tensor):
            if part.numel() > 1 or isinstance(part, nn.Parameter):
                raise NoTrialError(
                    f"it kept tensors in {where}, and only what is in its state, by parameter, moves along"
                )
            part = part.detach().clone()
        elif not isinstance(part, _PLAIN) and type(part).__module__.partition(".")[0] not in shared:
            return None
        known.append(part)
        return len(known) - 1

    pickler.persistent_id = persistent_id  # type: ignore[method-assign]
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise NoTrialError(f"{where} cannot be copied ({error})") from error
    unpickler = pickle.Unpickler(io.BytesIO(file.getvalue()))
    unpickler.persistent_load = known.__getitem__  # type: ignore[method-assign]
    return unpickler.load()
