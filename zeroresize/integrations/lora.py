"""LoRA of PEFT around parallel layers: what of its matrices belongs to a layer's units is divided as the layer is.

To y = W x it adds B A x. Where W is column-parallel, so is B, whose rows are the units'; where W is row-parallel, so is
A, whose columns are. Every rank holds the other matrix whole. What adds them up is PEFT's own forward.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from zeroresize.integrations.changed_modules import why_changed
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segment import Segment
from zeroresize.utils.torch_private import is_dtensor


def is_lora(module: object) -> bool:
    """Tell whether LoRA has put ``module`` around a linear layer."""
    kind: Any = getattr(sys.modules.get("peft.tuners.lora.layer"), "Linear", None)
    return kind is not None and type(module) is kind


def base_of(module: Any) -> Any:
    """Return the layer that LoRA has wrapped; anything else as it is."""
    return module.base_layer if is_lora(module) else module


def wrappers_in(model: nn.Module) -> dict[Any, Any]:
    """Return LoRA's wrappers in ``model``, by the layer in each."""
    return {module.base_layer: module for module in model.modules() if is_lora(module)}


def outer_name(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the name of a layer's wrapper; without one that of the layer."""
    holder = name.rpartition(".")[0]
    is_wrapped = name in modules and is_lora(modules.get(holder)) and base_of(modules[holder]) is modules[name]
    return holder if is_wrapped else name


def of_bases(segment: Segment) -> Segment:
    """Return a segment of layers in place of LoRA's wrappers around them."""
    column, shared = (list(map(base_of, layers)) for layers in (segment.column, segment.shared))
    return dataclasses.replace(segment, column=column, shared=shared, row=base_of(segment.row))


def matrices_of(wrapper: Any) -> dict[str, Any]:
    """Return the matrices that belong to the units of the layer in a wrapper, by name in it."""
    side = "lora_B" if wrapper.base_layer.is_column_parallel else "lora_A"
    return {f"{side}.{adapter}": matrix for adapter, matrix in getattr(wrapper, side).items()}


def all_matrices(model: nn.Module) -> set[Any]:
    """Return LoRA's matrices in ``model``; of those that PEFT has split the features become those of all ranks."""
    sides = (side for wrapper in wrappers_in(model).values() for side in (wrapper.lora_A, wrapper.lora_B))
    matrices: set[Any] = {matrix for side in sides for matrix in side.values()}
    for matrix in matrices:
        if is_dtensor(matrix.weight):
            matrix.out_features, matrix.in_features = matrix.weight.shape
    return matrices


def why_no_lora(wrapper: Any) -> str | None:
    """Tell why an adapter in a wrapper computes otherwise than LoRA; None if none does."""
    are_dora = (adapter for adapter, is_dora in wrapper.use_dora.items() if is_dora)
    names = sorted({*are_dora, *getattr(wrapper, "lora_variant", ())})
    why = "is no plain LoRA, such as DoRA (use_dora), whose norms are of whole rows"
    return f"{', '.join(names)} {why}" if names else None


def why_not_whole(model: nn.Module) -> str | None:
    """Name a tensor of LoRA that may be a rank's part, and is not known as such; None if there is none."""
    for name, module in model.named_modules():
        if not is_lora(module):
            continue
        base = module.base_layer
        for side, dim, size in (("lora_A", 1, "in_features"), ("lora_B", 0, "out_features")):
            for adapter, matrix in getattr(module, side).items():
                held = matrix.weight.shape[dim]
                if type(matrix) is nn.Linear and not is_dtensor(matrix.weight) and held != getattr(base, size, held):
                    return (
                        f"{name}.{side}.{adapter} has {held} of {getattr(base, size)} features, and is not divided as "
                        "the layer is. Convert the layer, too, after PEFT has wrapped it"
                    )
    return None


def why_adapted(model: nn.Module, name: str, layer: Any) -> str | None:
    """Tell why units of a layer that was called so stay where they are, for what PEFT has put around it; or None."""
    kind: Any = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    if kind is None:
        return None
    path: list[Any] = [model]
    for part in name.split("."):
        path.append(getattr(path[-1], part, None))
    for holder in path if path[-1] is layer else model.modules():
        if isinstance(holder, kind) and any(module is layer for module in holder.modules()):
            why = _why_stays(holder, layer) if is_lora(holder) and holder.base_layer is layer else _STAYS_BEHIND
            if why is not None:
                return f"it is in a {type(holder).__module__}.{type(holder).__name__}, {why}"
    return None


_STAYS_BEHIND = "whose matrices of the layer's units would stay behind"


def _why_stays(wrapper: Any, layer: Any) -> str | None:
    if (why := why_no_lora(wrapper)) is not None:
        return f"of which {why}"
    if not layer.is_column_parallel and any(getattr(each, "p", 0.0) for each in wrapper.lora_dropout.values()):
        return "whose dropout (lora_dropout) of x each rank would draw for units of its own: set it to 0 for this layer"
    for key, matrix in matrices_of(wrapper).items():
        is_known = isinstance(matrix, BalancedLinear) and layer.segment in (None, matrix.segment)
        if not is_known:
            return f"whose {key} is not divided as the layer is: wrap the model before convert, and add all adapters"
    inner = set(layer.modules())
    others = (part for part in wrapper.modules() if part not in inner)
    changes = (why_changed(part, is_whole=not isinstance(part, BalancedLinear)) for part in others)
    return next((f"of which a part {changed}" for changed in changes if changed is not None), None)
