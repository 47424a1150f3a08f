"""Whether every rank has whole heads of an attention module: else its forward fails in words about views."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from zeroresize.comm.collectives import group_size
from zeroresize.integrations.hosts import host_of, process_group_of

#: What attention modules call the size of a head, and the layers whose output they view as heads.
_SIZES = ("head_dim", "attention_head_size")
_QKV = re.compile(r"(to_|w)?(q|k|v|qkv)(_proj)?|query|key|value")


def require_whole_heads(model: nn.Module) -> None:
    """Check that the ranks divide the heads of attention modules that tell how large a head is.

    Raises:
        ValueError: if they do not, naming the layer, its heads and the ranks.
    """
    for path, module in model.named_modules():
        size = next((value for value in (getattr(module, key, None) for key in _SIZES) if isinstance(value, int)), 0)
        for name, layer in module.named_children() if size else ():
            if not (_QKV.fullmatch(name) and _hands_on_its_rows(layer)):
                continue
            (heads, left), ranks = divmod(layer.out_features, size), _num_ranks(layer)
            if not left and heads % ranks:
                raise ValueError(
                    f"{path}.{name} has {heads} heads of {size} rows and is split over {ranks} ranks, which cuts "
                    "through heads: num_attention_heads and num_key_value_heads must be divisible by the number "
                    "of ranks. Split over fewer ranks, or leave this attention's layers out of the plan".lstrip(".")
                )


def _hands_on_its_rows(layer: Any) -> bool:
    """Whether it is column-parallel and returns this rank's part."""
    host = host_of(layer)
    if host is None or host.why_left_alone(layer) == "gather_output=True" or getattr(layer, "gather_output", False):
        return False
    placements = getattr(layer.weight, "placements", ())
    return bool(getattr(layer, "is_column_parallel", any(placement.is_shard(0) for placement in placements)))


def _num_ranks(layer: Any) -> int:
    host = host_of(layer)
    return 1 if host is None else group_size(process_group_of(host, layer))
