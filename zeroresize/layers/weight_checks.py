"""Whether a layer's weight is what balancing needs: a parameter [N, K] of its own that is never replaced."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from zeroresize.utils.torch_private import hooks_of, is_flat_parameter, is_tensor_of_tensors, parameters_of


def why_no_whole_weight(layer: Any) -> str | None:
    """Tell why the layer has no weight parameter of its own; None if it has one.

    Parametrizations, ``torch.nn.utils.weight_norm`` and pruning make the weight anew in every forward. FSDP1 keeps it
    in a flat parameter.
    """
    weight = parameters_of(layer).get("weight")
    if weight is None:
        makers = _makers_of_weight(layer)
        if makers:
            return f"its weight is no parameter: {', '.join(makers)} makes it anew in every forward"
        return "its weight is no parameter: something holds it elsewhere, as FullyShardedDataParallel does"
    if is_flat_parameters(weight) and weight.dim() != 2:
        return "FullyShardedDataParallel flattens and shards its weight"
    return None


def is_flat_parameters(weight: Tensor) -> bool:
    """Tell whether FSDP1 replaces ``weight`` by a part of a flat one while it computes (``use_orig_params=True``)."""
    return is_flat_parameter(weight)


def is_sharded(weight: Tensor) -> bool:
    """Tell whether ``weight`` is a tensor of tensors, such as the DTensor that FSDP2's ``fully_shard`` makes."""
    return is_tensor_of_tensors(weight)


def is_sharded_in(owner: Any, parameter: Tensor) -> bool:
    """Tell whether a rank holds only a shard of its part of a module's parameter between forwards.

    A layer whose host makes its parameters DTensors knows which of these are whole parts.
    """
    ask = getattr(owner, "is_sharded_further", None)
    return is_sharded(parameter) if ask is None else bool(ask(parameter))


def _makers_of_weight(layer: Any) -> list[str]:
    if parametrize.is_parametrized(layer, "weight"):
        return [f"the parametrization {type(one).__name__}" for one in layer.parametrizations["weight"]]
    hooks = hooks_of(layer, "forward_pre").values()
    names = {"name", "_tensor_name"}  # as weight_norm and spectral_norm, and pruning, call what they make
    return [type(hook).__name__ for hook in hooks if "weight" in {getattr(hook, name, None) for name in names}]


def is_wrapped_by_fsdp(module: nn.Module) -> bool:
    """Return whether ``FullyShardedDataParallel`` or ``fully_shard`` has a module, without importing them."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel | fsdp.FSDPModule)
