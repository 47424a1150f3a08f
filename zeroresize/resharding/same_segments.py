"""require_same_segments(): the ranks of a group mean the same segments before their units are divided."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import message_device
from zeroresize.layers.segment import OwnedSegment
from zeroresize.resharding.agreement import gather_texts, meet_over


def require_same_segments(
    segments: Sequence[OwnedSegment],
    shares: Any,
    error: Exception | None,
    process_group: ProcessGroup,
    device: torch.device,
) -> None:
    """Check that all ranks found the same segments, and are to divide them alike; collective.

    Args:
        segments: of this rank.
        shares: by which it is to divide them.
        error: what kept this rank from finding any.
        device: of the model.

    Raises:
        Exception: ``error``, on the rank that has one.
        ValueError: on every other rank then, and on every rank where they differ, naming what does.
        RuntimeError: if a rank does not come.
    """
    of_rank = {one.name: _described(one) for one in segments}
    from_here = {"error": None if error is None else str(error), "shares": shares, "segments": of_rank}
    meet = meet_over(process_group, device)
    texts = gather_texts(json.dumps(from_here), meet, process_group, message_device(process_group, device))
    if error is not None:
        raise error
    from_ranks = [json.loads(text) for text in texts]
    for rank, other in enumerate(from_ranks):
        if other["error"] is not None:
            raise ValueError(f"nothing was divided, as rank {rank} of the group failed: {other['error']}")
    for rank, other in enumerate(from_ranks):
        if other != from_ranks[0]:
            raise ValueError(
                f"nothing was divided, as ranks 0 and {rank} of the group differ: "
                f"{_difference(from_ranks[0], other)}. The same model, segments= and shares= are needed on every rank"
            )


def _described(segment: OwnedSegment) -> dict[str, Any]:
    return {
        "kind": segment.kind,
        "layers": list(segment.layers),
        "units": len(segment.owned.owners),
        "quantum": segment.quantum,
        "min_units": segment.min_units,
        "on_change": segment.on_change is not None,
        "tensors": [[one.name, one.dim, one.rows, one.num_blocks] for one in segment.tensors],
    }


def _difference(ones: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    if ones["shares"] != others["shares"]:
        return f"shares={ones['shares']} and shares={others['shares']}"
    first, second = ones["segments"], others["segments"]
    alone = sorted(first.keys() ^ second.keys())
    if alone:
        return f"only one of them has the segments of {', '.join(alone)}"
    for name, fields in first.items():
        for key, value in fields.items():
            if second[name][key] != value:
                return f"of the segment of {name}, {key} is {value} and {second[name][key]}"
    return "the order of their segments"
