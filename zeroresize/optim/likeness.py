"""An optimizer like another one, of other parameters: with its settings, and all by which it may know a parameter."""

from __future__ import annotations

import copy
import enum
import inspect
import re
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroresize.utils.torch_private import is_private_of_optimizer


class NoTrialError(Exception):
    """Raised where an optimizer cannot be tried; its text says why.

    Attributes:
        has_defaults: whether only settings are unknown, and the class has defaults for them.
    """

    def __init__(self, reason: str, *, has_defaults: bool = False) -> None:
        super().__init__(reason)
        self.has_defaults = has_defaults


class KeepsTensorsError(Exception):
    """Raised where an optimizer keeps tensors besides its state, which alone moves along."""


def require_state_only(optimizer: Optimizer) -> None:
    """Check that an optimizer that has stepped keeps nothing of its parameters elsewhere than in ``state``.

    Raises:
        KeepsTensorsError: where it does, naming it.
    """
    parameters = {id(one) for group in optimizer.param_groups for one in group["params"]}
    places = {f"its attribute {name}": one for name, one in vars(optimizer).items() if not _is_of_torch(name)}
    for group in optimizer.param_groups:
        places |= {f"the setting {name} of a group": one for name, one in group.items() if name != "params"}
    for where, value in places.items():
        if any(found == "tensors" and id(one) not in parameters for found, one in _found_in(value, optimizer)):
            raise KeepsTensorsError(
                f"in a trial it kept tensors in {where}, and only what is in its state, by parameter, moves along"
            )


@dataclass
class Like:
    """Describes one of the parameters that an optimizer cannot tell from each other, but for their values.

    Attributes:
        sizes: of the rows and columns of the largest; one size of vectors.
        name: in the model, where the optimizer knows it.
        state: what its state holds besides tensors.
    """

    tensor: Tensor
    sizes: tuple[int, ...]
    name: str | None = None
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Groups parameters that an optimizer steps with the same settings, as far as it can tell them from each other."""

    settings: Mapping[str, Any]
    likes: Sequence[Like]


LR = 0.05
#: Of so many parameters at most numbers in names, attributes and state count: they may be those of layers.
_FEW = 8

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, range, slice),
    *(torch.dtype, torch.device, torch.Size),
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)
_CONTAINERS = (dict, defaultdict, OrderedDict, list, tuple, set, frozenset, deque)
_REDUCES = vars(object)["__reduce_ex__"]  # by what __dict__ holds, unless a class has another
#: Values that are looked at in an attribute at most.
_MOST_VALUES = 10_000
#: Whose objects at parameters say how these are divided; a trial's have the very same.
_DIVIDING = ("torch", "colossalai", "zeroresize")


def cases_of(optimizer: Optimizer, tensors: Iterable[Tensor]) -> list[Case]:
    """Group ``tensors`` by the settings that an optimizer steps them with, and by what it can tell of them."""
    place_of = {id(one): (group, at) for group in optimizer.param_groups for at, one in enumerate(group["params"])}
    groups: dict[str, tuple[dict[str, Any], list[Like]]] = {}
    for tensor in tensors:
        if id(tensor) in place_of:
            group, at = place_of[id(tensor)]
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            # Trials have a learning rate of their own.
            settings_given = {
                key: value for key, value in settings.items() if not (key.endswith("lr") and isinstance(value, float))
            }
            rows = tensor.shape[0] if tensor.dim() else 1
            sizes = (rows, tensor.numel() // max(rows, 1)) if tensor.dim() > 1 else (rows,)
            like = Like(tensor, sizes, (group.get("param_names") or {at: None})[at], _known_state(optimizer, tensor))
            key = f"{len(sizes)} {tensor.device} {tensor.dtype} {settings_given}"
            groups.setdefault(key, (settings, []))[1].append(like)
    return [Case(settings, _distinct(likes)) for settings, likes in groups.values()]


def _distinct(likes: Sequence[Like]) -> list[Like]:
    texts = [_text_of(like) for like in likes]
    if len(set(texts)) > _FEW:
        texts = [re.sub(r"\d+", "#", text) for text in texts]
    values: dict[str, Like] = {}
    for text, like in zip(texts, likes, strict=True):
        first = values.setdefault(text, like)
        first.sizes = tuple(map(max, first.sizes, like.sizes))
    return list(values.values())


def _text_of(like: Like) -> str:
    attributes = {name: _shown(value) for name, value in sorted(vars(like.tensor).items())}
    return f"{like.name} {attributes} { ({key: _shown(value) for key, value in like.state.items()}) }"


def _shown(value: Any) -> str:
    """Of functions and objects only what they are: their addresses would make all parameters differ."""
    if isinstance(value, Tensor) or not _is_plain(value):
        return type(value).__qualname__
    return re.sub(r"0x[0-9a-f]+", "", repr(value))


def _known_state(optimizer: Optimizer, tensor: Tensor) -> dict[str, Any]:
    state = optimizer.state.get(tensor)
    if not isinstance(state, Mapping):
        return {}
    return {key: value for key, value in state.items() if not isinstance(value, Tensor) and _is_plain(value)}


def mark_alike(parameters: Sequence[nn.Parameter], likes: Sequence[Like]) -> None:
    """Give each the attributes of the tensor that it stands for.

    Raises:
        NoTrialError: if one cannot be copied.
    """
    for parameter, like in zip(parameters, likes, strict=True):
        for name, value in vars(like.tensor).items():
            if type(value).__module__.partition(".")[0] in _DIVIDING and not isinstance(value, Tensor):
                vars(parameter)[name] = value
            elif _is_plain(value):
                vars(parameter)[name] = copy.deepcopy(value)
            else:
                raise NoTrialError(f"the attribute {name} of its parameters cannot be copied")


def made_like(
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    parameters: Sequence[nn.Parameter],
    likes: Sequence[Like],
    *,
    by_default: bool,
) -> Optimizer:
    """Make an optimizer of other parameters, with the settings of a group, of the constructor, and all else.

    Args:
        parameters: which stand for those of ``likes``.
        by_default: whether what the constructor was given, and the instance does not tell, is taken to be the default.

    Raises:
        NoTrialError: if a setting is unknown, or cannot be copied.
    """
    kind, kept = type(optimizer), copy.deepcopy(dict(settings))
    if kept.get("lr") is not None:  # at the start of a warm-up it is zero
        kept["lr"] = LR
    held = {name: one for name, one in vars(optimizer).items() if not _is_of_torch(name)}
    _require_no_ids(optimizer, {**held, **settings}, likes)
    holds = {name: {found for found, _ in _found_in(one, optimizer)} for name, one in held.items()}
    plain = {name: copy.copy(one) for name, one in held.items() if holds[name] <= {"plain"}}
    known = {name.removeprefix("_"): one for name, one in plain.items()}
    known |= {**plain, **copy.deepcopy(optimizer.defaults), **kept}
    wanted, unknown = {}, []
    for name, argument in list(inspect.signature(kind.__init__).parameters.items())[2:]:
        if argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            if name in known:
                wanted[name] = known[name]
            elif not by_default or argument.default is argument.empty:
                unknown.append(argument)
    if unknown:
        has_defaults = all(argument.default is not argument.empty for argument in unknown)
        reason = f"its instance does not tell with which {unknown[0].name}= it was made"
        raise NoTrialError(reason, has_defaults=has_defaults)
    names = {"param_names": [one.name for one in likes]} if likes[0].name is not None else {}
    trial = kind([{**kept, "params": list(parameters), **names}], **wanted)
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
        elif _has_any(value, [one.tensor for one in likes]) and not _has_any(made, parameters):
            raise NoTrialError(f"its attribute {name} has parameters that it was not made with")
    return trial


def _require_no_ids(optimizer: Optimizer, held: Mapping[str, Any], likes: Sequence[Like]) -> None:
    """A trial's parameters have other ids, by which its optimizer would know none of them."""
    ids = {id(one) for group in optimizer.param_groups for one in group["params"]}
    marks = {name: one for like in likes for name, one in (*vars(like.tensor).items(), *like.state.items())}
    for name, value in (*held.items(), *marks.items()):
        if any(type(one) is int and one in ids for _, one in _found_in(value, optimizer)):
            raise NoTrialError(f"it knows parameters by their id(), in {name}, and those of a trial have others")


def _has_any(root: Any, tensors: Iterable[Tensor]) -> bool:
    wanted = {id(one) for one in tensors}
    return any(id(one) in wanted for found, one in _found_in(root) if found == "tensors")


def _is_plain(value: Any) -> bool:
    """Whether it holds settings only, which can be copied."""
    return all(kind == "plain" for kind, _ in _found_in(value))


def _is_of_torch(name: str) -> bool:
    """Whether an attribute is what every optimizer has for its parameters, or a learning rate scheduler's."""
    return name in ("state", "param_groups", "defaults", "step") or is_private_of_optimizer(name)


def _found_in(root: Any, optimizer: Optimizer | None = None) -> Iterator[tuple[str, Any]]:
    """What is in an attribute: settings ("plain"), tensors as of parameters or their state, or anything else."""
    to_see, seen = [root], {id(optimizer)}
    while to_see:
        value = to_see.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            yield "plain", value
            continue
        seen.add(id(value))
        if len(seen) > _MOST_VALUES:
            yield "other", value
            return
        if isinstance(value, Tensor):
            yield "plain" if value.numel() <= 1 and not isinstance(value, nn.Parameter) else "tensors", value
        elif type(value) in _CONTAINERS:
            to_see += [*value.keys(), *value.values()] if isinstance(value, dict) else value
        elif isinstance(value, types.MethodType):
            to_see.append(value.__self__)
        elif hasattr(value, "__dict__") and type.__getattribute__(type(value), "__reduce_ex__") is _REDUCES:
            to_see += vars(value).values()
        else:
            yield "other", value
