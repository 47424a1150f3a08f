"""What can be checked of a segment that is somebody's word, as that heads stay whole, and of how ranks divide heads."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zeroresize.comm.collectives import group_size
from zeroresize.integrations.hosts import GATHERED, host_of, process_group_of
from zeroresize.integrations.known_modules import StaysEven
from zeroresize.integrations.lora import base_of, outer_name
from zeroresize.integrations.module_state import restored
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segment import Segment
from zeroresize.utils.torch_private import buffers_of, is_dtensor, parameters_of

#: Attributes by which modules keep how many features one head has.
_SIZES = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_head")
#: Names of counts of heads.
_COUNTS = re.compile(r"heads?$|^n_?head|^n(um)?_kv")
_NO_COUNTS = re.compile(r"(dim|size|groups|layers?)$")
#: Names of layers whose output is viewed as heads.
_QKV = re.compile(r"(to_|w)?(q|k|v|qkv)(_proj)?|query|key|value")


def require_all_features(model: nn.Module) -> None:
    """Check that no layer of DTensors has lost what the ranks do not divide, as when transformers 4.51 loads it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_dtensor(module.weight) and host_of(module) is not None:
            held, wanted = tuple(module.weight.shape), (module.out_features, module.in_features)
            if held != wanted:
                raise ValueError(
                    f"{name} is a layer of shape {wanted}, of which all ranks together hold {held}: what split it has "
                    "lost the rest. Split over a number of ranks that divides it, or split the whole model by "
                    "zeroresize.ColwiseParallel and RowwiseParallel with unit_size="
                )


def require_heads_on_ranks(model: nn.Module) -> None:
    """Check that ranks hold whole heads of attention modules: else a forward fails in words about views."""
    for path, module in model.named_modules():
        sizes = (getattr(module, name, None) for name in ("head_dim", "attention_head_size"))
        size = next((value for value in sizes if isinstance(value, int)), 0)
        for name, child in module.named_children() if size else ():
            layer = base_of(child)
            ranks = _ranks_of_rows(layer) if _QKV.fullmatch(name) else 1
            if ranks == 1:
                continue
            is_known = isinstance(layer, BalancedLinear)
            heads, left = divmod(layer.whole_size if is_known else layer.out_features, size)
            rows = [layer.home_shape_on(rank)[0] if is_known else heads * size / ranks for rank in range(ranks)]
            if not left and any(of_rank % size for of_rank in rows):
                raise ValueError(
                    f"{path}.{name} has {heads} heads of {size} rows and is split over {ranks} ranks, which cuts "
                    "through heads: each rank needs whole ones, and one KV head at least. Split it with unit_size=, "
                    "over fewer ranks, or leave this attention's layers out of the plan".lstrip(".")
                )


def _ranks_of_rows(layer: Any) -> int:
    """Over how many ranks a layer is split that is column-parallel and returns this rank's part; else 1."""
    host = host_of(layer)
    if host is None or host.why_left_alone(layer) == GATHERED or getattr(layer, "gather_output", False):
        return 1
    shards = [placement.is_shard(0) for placement in getattr(layer.weight, "placements", ())]
    is_column = getattr(layer, "is_column_parallel", any(shards))
    return group_size(process_group_of(host, layer)) if is_column else 1


def require_sound(
    segment: Segment,
    rows: Mapping[str, Sequence[int]],
    units: Sequence[int],
    modules: Mapping[str, Any],
    moving: Collection[int],
) -> None:
    """Check of somebody's word what can be seen without running the model.

    Args:
        rows: of the column-parallel layers, and of the row-parallel one at last, by name: how many features belong to a
            unit in each part.
        units: of this rank, at even shares.
        modules: of the model, by name.
        moving: the parameters that move along, by ``id``.
    """
    parts = _parts(list(rows), modules)
    holders = [module for module, _ in parts.values() if not type(module).__module__.startswith("torch.")]
    sizes = ((getattr(module, name, None), f"{type(module).__name__}.{name}") for module in holders for name in _SIZES)
    size_there = next((each for each in sizes if type(each[0]) is int and each[0] > 0), (None, ""))
    _require_whole_heads(segment, {name: math.gcd(*of_parts) for name, of_parts in rows.items()}, *size_there)
    num_features = {len(units) * of_part for of_parts in rows.values() for of_part in of_parts}
    is_divisible_anywhere = segment.unit_size == 1 and segment.kind != "heads"
    if segment.on_change is None and not is_divisible_anywhere:
        for module in holders:
            _require_no_count(module, len(units), num_features)
    head_size = segment.head_size or size_there[0] or segment.unit_size
    of_units = num_features | {len(units), len(units) * segment.unit_size // head_size}
    of_all = {size for name in rows for size in modules[name].whole_sizes}
    holder, _ = next(iter(parts.values()))
    for name, (module, holds_layers) in parts.items():
        # In a module of its own it is as likely of the features that all heads have, as a norm or a rotary embedding.
        others = of_all | {1} | (set() if holds_layers else {head_size, head_size // 2})
        for attribute, tensor in (vars(module) | parameters_of(module) | buffers_of(module)).items():
            shape = list(local_of(tensor).shape) if isinstance(tensor, Tensor) else []
            suspects = [size for size in of_units - others if shape.count(size) == 1]
            if suspects and id(tensor) not in moving and not _follows(segment, units, module, attribute, holder):
                remedy = "on_change must set it for the units that it is called with"
                if tensor.requires_grad:
                    remedy = "parameters beside the layers move along if named by extra=: do, or leave the segment out"
                raise StaysEven(
                    f"{name}.{attribute}, of shape {shape}, seems to be of the {suspects[0]} units, heads or features "
                    f"that a rank has, and does not follow them: {remedy}"
                )


def _require_whole_heads(segment: Segment, rows: Mapping[str, int], size_there: int | None, place: str) -> None:
    size, where = segment.head_size, "head_size"
    *columns, _row = rows
    if size is None and (segment.unit_size > 1 or segment.kind != "neurons"):
        size, where = size_there, place
    if size is None and segment.unit_size > 1 and {rows[name] for name in columns} != {segment.unit_size}:
        counts = ", ".join(f"{number} of {name}" for name, number in rows.items())
        raise StaysEven(
            f"its layers hold different numbers of features of a unit ({counts}), so that a unit may be a part of a "
            "head: say by head_size= how many output features are one head (1 if any number may be a unit)"
        )
    for name, number in rows.items():
        if size is not None and number % size:
            what = f"{number} feature{'s' if number > 1 else ''}"
            raise StaysEven(
                f"unit_size={segment.unit_size} makes {what} of {name} a unit, which are no whole heads of {size} "
                f"({where}): say unit_size={size} for one head. With heads that share keys and values a unit is a "
                f"key's head with all of its queries' heads, unit_size=(query heads / key heads) * {size}. Say "
                "head_size= if heads are of another size (1 if any number of features may be a unit)"
            )


def _require_no_count(module: nn.Module, num_units: int, num_features: set[int]) -> None:
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


def _parts(layers: Sequence[str], modules: Mapping[str, Any]) -> dict[str, tuple[nn.Module, bool]]:
    """The modules that hold the layers, from the nearest that holds all of them, and their children without layers.

    Each by its name, with whether it holds layers.
    """
    paths = [outer_name(name, modules).split(".")[: None if modules[name].is_segment else -1] for name in layers]
    common = 0
    while all(len(path) > common for path in paths) and len({path[common] for path in paths}) == 1:
        common += 1
    names = {".".join(path[:length]): None for path in paths for length in range(common, len(path) + 1)}
    parts = {name: (modules[name], True) for name in names}
    for name in names:
        for child_name, child in modules[name].named_children():
            if not any(isinstance(inside, BalancedLinear) for inside in child.modules()):
                prefix = f"{name}.{child_name}" if name else child_name
                parts |= {inner: (module, False) for inner, module in child.named_modules(prefix=prefix)}
    return parts
