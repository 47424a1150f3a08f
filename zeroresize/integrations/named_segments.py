"""What can be checked of a segment that is somebody's word: whole heads, and counts that must follow the units.

``U`` units of a rank at even shares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from zeroresize.integrations.segment_registry import StaysEven
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segment import Segment

#: Attributes by which modules keep how many features one head has.
_SIZES = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_head")
#: Names of counts of heads.
_COUNTS = re.compile(r"heads?$|^n_?head|^n(um)?_kv")
_NO_COUNTS = re.compile(r"(dim|size|groups|layers?)$")


def require_whole_heads(segment: Segment, rows: Mapping[str, int], row: str, modules: Mapping[str, nn.Module]) -> None:
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
    segment: Segment, num_units: int, num_features: Sequence[int], layers: Sequence[str], modules: Mapping[str, Any]
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


def _size_of_head(layers: Sequence[str], modules: Mapping[str, nn.Module]) -> tuple[int | None, str]:
    for module in _between(layers, modules):
        for name in _SIZES:
            size = getattr(module, name, None)
            if type(size) is int and size > 0:
                return size, f"{type(module).__name__}.{name}"
    return None, ""


def _between(layers: Sequence[str], modules: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """The modules that hold the layers, from the nearest that holds all of them, and their children without layers."""
    paths = [name.split(".")[:-1] for name in layers]
    common = 0
    while all(len(path) > common for path in paths) and len({path[common] for path in paths}) == 1:
        common += 1
    names = {".".join(path[:length]): None for path in paths for length in range(common, len(path) + 1)}
    seen: dict[nn.Module, None] = {modules[name]: None for name in names}
    for module in list(seen):
        for child in module.children():
            if not any(isinstance(one, BalancedLinear) for one in child.modules()):
                seen |= dict.fromkeys(child.modules())
    yield from (module for module in seen if not type(module).__module__.startswith("torch."))
