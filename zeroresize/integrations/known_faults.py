"""Faults of hosts that train wrong without a word of theirs: said in one line where a model has such a setting.

``docs/hosts/known_faults.md`` has all of them, with versions and figures; here is what modules and optimizers show.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

logger = logging.getLogger(__name__)

_said: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def _is(module: nn.Module, kind: str) -> bool:
    return any(kind in parent.__name__ for parent in type(module).__mro__)


def _setting(module: nn.Module, name: str) -> Any:
    """Of Colossal-AI's configuration, which the forward that it gave a module holds."""
    forward = getattr(module.__dict__.get("forward"), "__func__", None)
    held = getattr(forward, "keywords", None) or (
        inspect.getclosurevars(forward).nonlocals if inspect.isfunction(forward) else {}
    )
    return getattr(held.get("shard_config"), name, None)


def _drops_by_rank(model: nn.Module, optimizer: Any) -> Iterator[str]:
    for place, parent in model.named_modules():
        is_behind_rows = False
        for name, module in parent.named_children():
            is_behind_rows = is_behind_rows or (_is(module, "Linear") and _is(module, "_Row"))
            if is_behind_rows and _is(module, "DropoutForParallelInput") and name != "attn_dropout" and module.p:
                yield f"{place}.{name}"


def _sees_later_tokens(model: nn.Module, optimizer: Any) -> Iterator[str]:
    for name, module in model.named_modules():
        kind, config = type(module).__name__, getattr(module, "config", None)
        if kind == "GPT2LMHeadModel" and "forward" in module.__dict__ and config._attn_implementation == "sdpa":
            if not _setting(module, "enable_flash_attention"):
                yield name
        elif (
            kind == "LlamaAttention"
            and _setting(module, "enable_sequence_parallelism")
            and not _setting(module, "enable_flash_attention")
        ):
            yield name


def _never_sums_biases(model: nn.Module, optimizer: Any) -> Iterator[str]:
    for name, module in model.named_modules():
        is_divided = getattr(module, "seq_parallel_mode", None) in ("split_gather", "ring") and _is(module, "_Row")
        bias = getattr(module, "bias", None)
        if is_divided and bias is not None and not getattr(bias, "partial_derived", False):
            yield f"{name}.bias"


def _counts_for_less(model: nn.Module, optimizer: Any) -> Iterator[str]:
    if getattr(optimizer, "max_norm", 0):
        for name, module in model.named_modules():
            if _is(module, "Fused") and _is(module, "1D") and not hasattr(module.weight, "dist_layout"):
                yield f"{name}.weight"


def _sums_again(model: nn.Module, optimizer: Any) -> Iterator[str]:
    for name, module in model.named_modules():
        if getattr(module.__dict__.get("forward"), "__qualname__", "").startswith("ReplicatedWithGradAllReduce"):
            yield name


def _saves_what_nothing_reads(model: nn.Module, optimizer: Any) -> Iterator[str]:
    for name, module in model.named_modules():
        original = getattr(module, "original_module", None) if _is(module, "ModulesToSaveWrapper") else None
        if original is not None and "tp_forward" in getattr(original.__dict__.get("forward"), "__qualname__", ""):
            yield name


#: Distribution, the beginnings of its versions, who has the fault, what is wrong, what to do.
_FAULTS: tuple[tuple[str, tuple[str, ...], Callable[[nn.Module, Any], Iterator[str]], str, str], ...] = (
    ("colossalai", ("0.5.",), _drops_by_rank, "drops replicated activations otherwise on each rank", "set its p to 0"),
    (
        "colossalai",
        ("0.5.",),
        _sees_later_tokens,
        "lets tokens see later ones",
        "switch flash attention on, or load GPT-2 with attn_implementation='eager'",
    ),
    (
        "colossalai",
        ("0.5.",),
        _never_sums_biases,
        "has a gradient of this rank's tokens only, which nobody sums",
        "do without sequence parallelism, or sum it over the ranks before each step",
    ),
    ("colossalai", ("0.5.",), _counts_for_less, "counts for less in the clipping norm", "clip by zr.clip_grad_norm_"),
    (
        "transformers",
        ("5.",),
        _sums_again,
        "sums accumulated gradients over the ranks again at each backward",
        "run one backward a step",
    ),
    ("peft", ("0.",), _saves_what_nothing_reads, "never trains: it computes with the original's weights",
     "train that module itself, without modules_to_save"),
)  # fmt: skip


def warn_of_known_faults(model: nn.Module, optimizer: Any = None) -> None:
    """Say each known fault of a host whose version and setting ``model`` or ``optimizer`` has, once per model."""
    said = _said.setdefault(model, set())
    for package, versions, names_of, effect, remedy in _FAULTS:
        version = getattr(sys.modules.get(package), "__version__", "")
        is_asked = effect not in said and version.startswith(versions)
        name = next(names_of(model, optimizer), None) if is_asked else None
        if name is not None:
            said.add(effect)
            logger.warning("%s %s: %s %s: %s", package, version, name, effect, remedy)
