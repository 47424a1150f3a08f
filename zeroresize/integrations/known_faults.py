"""Faults of hosts that train wrong without a word of theirs: said in one line where a model has such a setting.

``docs/hosts/known_faults.md`` has all of them, with versions and figures; here is what modules and optimizers show.
"""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

logger = logging.getLogger(__name__)

_said: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def _is(module: nn.Module, *parts: str) -> bool:
    """Whether its class, or one that it is made of, has all these parts in its name."""
    return any(all(part in parent.__name__ for part in parts) for parent in type(module).__mro__)


def _setting(module: nn.Module, name: str) -> Any:
    """Of Colossal-AI's configuration, which the forward that it gave a module holds."""
    forward = getattr(module.__dict__.get("forward"), "__func__", None)
    held = getattr(forward, "keywords", {})  # of a partial
    held = inspect.getclosurevars(forward).nonlocals if inspect.isfunction(forward) else held
    return getattr(held.get("shard_config"), name, None)


def _forward_is_of(module: Any, name: str) -> bool:
    return name in getattr(getattr(module, "__dict__", {}).get("forward"), "__qualname__", "")


# Each takes a module and the optimizer, and returns what of the module has the fault, as the end of its name, or None.


def _drops_by_rank(module: nn.Module, optimizer: Any) -> str | None:
    is_behind_rows = False
    for name, child in module.named_children():
        is_behind_rows = is_behind_rows or _is(child, "Linear", "_Row")
        if is_behind_rows and _is(child, "DropoutForParallelInput") and name != "attn_dropout" and child.p:
            return f".{name}"
    return None


def _sees_later_tokens(module: nn.Module, optimizer: Any) -> str | None:
    kind, config = type(module).__name__, getattr(module, "config", None)
    is_gpt2 = kind == "GPT2LMHeadModel" and getattr(config, "_attn_implementation", None) == "sdpa"
    is_llama = kind == "LlamaAttention" and _setting(module, "enable_sequence_parallelism")
    return "" if (is_gpt2 or is_llama) and _setting(module, "enable_flash_attention") is False else None


def _never_sums_bias(module: nn.Module, optimizer: Any) -> str | None:
    is_divided = getattr(module, "seq_parallel_mode", None) in ("split_gather", "ring") and _is(module, "_Row")
    bias = getattr(module, "bias", None) if is_divided else None
    return None if bias is None or getattr(bias, "partial_derived", False) else ".bias"


def _counts_for_less(module: nn.Module, optimizer: Any) -> str | None:
    has_fault = getattr(optimizer, "max_norm", 0) and _is(module, "Fused", "1D")
    return ".weight" if has_fault and not hasattr(module.weight, "dist_layout") else None


def _sums_again(module: nn.Module, optimizer: Any) -> str | None:
    return "" if _forward_is_of(module, "ReplicatedWithGradAllReduce") else None


def _is_never_read(module: nn.Module, optimizer: Any) -> str | None:
    is_copy = _is(module, "ModulesToSaveWrapper") and _forward_is_of(module.original_module, "tp_forward")
    return "" if is_copy else None


# fmt: off
#: Package, the beginning of the versions in which it was seen, what has the fault, what is wrong, what to do.
_FAULTS = (
    ("colossalai", "0.5.0", _drops_by_rank, "drops replicated activations otherwise on each rank", "set its p to 0"),
    ("colossalai", "0.5.0", _sees_later_tokens, "lets tokens see later ones",
     "switch flash attention on, or load GPT-2 with attn_implementation='eager'"),
    ("colossalai", "0.5.0", _never_sums_bias, "has a gradient of this rank's tokens only, which nobody sums",
     "do without sequence parallelism, or sum it over the ranks before each step"),
    ("colossalai", "0.5.0", _counts_for_less, "counts for less in the clipping norm", "clip by zr.clip_grad_norm_"),
    ("transformers", "5.24.", _sums_again,
     "sums accumulated gradients over the ranks again at each backward, if a step has several backwards",
     "run one backward a step"),
    ("peft", "0.21.", _is_never_read, "never trains: it computes with the original's weights",
     "train that module itself, without modules_to_save"),
)
# fmt: on


def warn_of_known_faults(model: nn.Module, optimizer: Any = None) -> None:
    """Say each known fault of a host whose version and setting ``model`` or ``optimizer`` has, once per model."""
    said = _said.setdefault(model, set())
    for package, versions, fault, effect, remedy in _FAULTS:
        version = getattr(sys.modules.get(package), "__version__", "")
        if effect in said or not version.startswith(versions):
            continue
        for name, module in model.named_modules():
            if (place := fault(module, optimizer)) is not None:
                said.add(effect)
                logger.warning("%s %s: %s%s %s: %s", package, version, name, place, effect, remedy)
                break
