"""What can be checked of a segment that is somebody's word: whole heads, and counts and tensors that follow the units.

``U`` units of a rank at even shares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zeroresize.integrations.module_state import restored
from zeroresize.integrations.segment_registry import StaysEven
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segment import Segment
from zeroresize.utils.torch_private import buffers_of, parameters_of

#: Of a model, by name.
Modules = Mapping[str, Any]

#: Attributes by which modules keep how many features one head has.
_SIZES = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_head")
#: Names of counts of heads.
_COUNTS = re.compile(r"heads?$|^n_?head|^n(um)?_kv")
_NO_COUNTS = re.compile(r"(dim|size|groups|layers?)$")


def require_whole_heads(segment: Segment, rows: Mapping[str, int], row: str, modules: Modules) -> None:
    """Check that no unit is a part of a head.

    Args:
        rows: of every column-parallel layer, by name, how many output features belong to a unit.
        row: name of the row-parallel layer.
        modules: of the model, by name.

    Raises:
        StaysEven: if one is, or if that cannot be seen.
    """
    size, where = segment.head_size, "head_size"
    if size is not None and (type(size) is not int or size < 1):
        raise StaysEven(f"head_size={size!r} is not allowed: wanted is a whole number of features, at least 1")
    if size is None and (segment.unit_size > 1 or segment.kind != "neurons"):
        size, where = _size_of_head([*rows, row], modules)
    if size is None:
        if segment.unit_size > 1 and set(rows.values()) != {segment.unit_size}:
            counts = ", ".join(f"{number} of {name}" for name, number in rows.items())
            raise StaysEven(
                f"its layers hold different numbers of features of a unit ({counts}, {segment.unit_size} of {row}), so "
                "that a unit may be a part of a head: say by head_size= how many output features are one head (1 if "
                "any number may be a unit)"
            )
        return
    for name, number in {**rows, row: segment.unit_size}.items():
        if number % size:
            what = f"{number} feature{'s' if number > 1 else ''}"
            raise StaysEven(
                f"unit_size={segment.unit_size} makes {what} of {name} a unit, which are no whole heads of {size} "
                f"({where}): say unit_size={size} for one head. With heads that share keys and values a unit is a "
                f"key's head with all of its queries' heads, unit_size=(query heads / key heads) * {size}. Say "
                "head_size= if heads are of another size (1 if any number of features may be a unit)"
            )


def require_follower(
    segment: Segment, num_units: int, num_features: Sequence[int], layers: Sequence[str], modules: Modules
) -> None:
    """Check that there is an ``on_change`` where the modules between the layers keep counts of what this rank holds.

    Args:
        num_units: U.
        num_features: of the layers on this rank, at even shares.

    Raises:
        StaysEven: if there is none, naming the count.
    """
    if segment.on_change is not None or (segment.unit_size == 1 and segment.kind != "heads"):
        return
    for module in _between(layers, modules):
        for name, value in vars(module).items():
            if type(value) is not int or value < 1 or name in _SIZES:
                continue
            is_count = _COUNTS.search(name) or (name.startswith(("num_", "n_")) and value == num_units)
            if value in num_features or (is_count and not _NO_COUNTS.search(name)):
                raise StaysEven(
                    f"{type(module).__name__}.{name}={value} seems to count what this rank holds, and there is no "
                    "on_change: give on_change=function, which is called with the list of the units that the rank "
                    f"owns and sets what follows them, such as {name}; on_change=lambda units: None if nothing does"
                )


def require_followed_tensors(
    segment: Segment, units: Sequence[int], num_features: Sequence[int], layers: Sequence[str], modules: Modules
) -> None:
    """Check that no tensor beside the layers is of single units (sinks, slopes, scales) and would not follow them.

    One is taken for such that has a dimension of as many units, heads or features as this rank has.

    Args:
        units: of this rank, at even shares.
        num_features: of the layers on this rank, at even shares.

    Raises:
        StaysEven: if one is, naming it.
    """
    head_size = segment.head_size or _size_of_head(layers, modules)[0] or segment.unit_size
    of_units = {len(units), len(units) * segment.unit_size // head_size, *num_features}
    of_all = {modules[name].even_shape[modules[name].is_column_parallel] for name in layers}
    parts = _parts(layers, modules)
    holder, _ = next(iter(parts.values()))
    for name, (module, holds_layers) in parts.items():
        # In a module of its own it is as likely of the features that all heads have, as a norm or a rotary embedding.
        others = of_all | {1} | (set() if holds_layers else {head_size, head_size // 2})
        for attribute, tensor in (vars(module) | parameters_of(module) | buffers_of(module)).items():
            shape = list(local_of(tensor).shape) if isinstance(tensor, Tensor) else []
            sizes = [size for size in of_units - others if shape.count(size) == 1]
            if sizes and not _follows(segment, units, module, attribute, holder):
                remedy = "on_change must set it for the units that it is called with"
                if tensor.requires_grad:
                    remedy = "parameters beside the layers do not move along: leave the segment out, and it stays even"
                raise StaysEven(
                    f"{name}.{attribute}, of shape {shape}, seems to be of the {sizes[0]} units, heads or features "
                    f"that a rank has, and does not follow them: {remedy}"
                )


def _follows(segment: Segment, units: Sequence[int], owner: Any, attribute: str, holder: nn.Module) -> bool:
    """Try whether ``on_change`` gives a tensor another shape for more units; one that fails tells when units move."""
    shape = getattr(owner, attribute).shape
    if getattr(owner, attribute).requires_grad or segment.on_change is None:
        return False
    with restored(holder):
        try:
            segment.on_change(sorted({*units, *range(len(units) + 1)}))
            follows = bool(getattr(owner, attribute).shape != shape)
            segment.on_change(list(units))
        except Exception:
            return True
    return follows


def _size_of_head(layers: Sequence[str], modules: Modules) -> tuple[int | None, str]:
    for module in _between(layers, modules):
        for name in _SIZES:
            size = getattr(module, name, None)
            if type(size) is int and size > 0:
                return size, f"{type(module).__name__}.{name}"
    return None, ""


def _between(layers: Sequence[str], modules: Modules) -> Iterator[nn.Module]:
    """The modules that hold the layers, and what else is in them, but for torch's."""
    parts = (module for module, _ in _parts(layers, modules).values())
    yield from (module for module in parts if not type(module).__module__.startswith("torch."))


def _parts(layers: Sequence[str], modules: Modules) -> dict[str, tuple[nn.Module, bool]]:
    """The modules that hold the layers, from the nearest that holds all of them, and their children without layers.

    Each by its name, with whether it holds layers.
    """
    paths = [name.split(".")[:-1] for name in layers]
    common = 0
    while all(len(path) > common for path in paths) and len({path[common] for path in paths}) == 1:
        common += 1
    names = {".".join(path[:length]): None for path in paths for length in range(common, len(path) + 1)}
    parts = {name: (modules[name], True) for name in names}
    for name in names:
        for child_name, child in modules[name].named_children():
            if not any(isinstance(one, BalancedLinear) for one in child.modules()):
                prefix = f"{name}.{child_name}" if name else child_name
                parts |= {inner: (one, False) for inner, one in child.named_modules(prefix=prefix)}
    return parts
