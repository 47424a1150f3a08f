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
from zeroresize.utils.texts import alike, at_fault, by_rank


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
    groups = alike(from_ranks)
    if len(groups) > 1:
        ranks = sorted(group[0] for group in sorted(groups, key=len, reverse=True)[:2])
        raise ValueError(
            f"nothing was divided, as ranks {ranks[0]} and {ranks[1]} of the group differ: "
            f"{_difference(ranks[0], ranks[1], from_ranks)}{at_fault(groups)}. The same model, "
            "segments= and shares= are needed on every rank"
        )


def _described(segment: OwnedSegment) -> dict[str, Any]:
    return {
        "kind": segment.kind,
        "layers": list(segment.layers),
        "units": len(segment.owned.owners),
        "quantum": segment.quantum,
        "min_units": segment.min_units,
        "on_change": segment.on_change is not None,
        "tensors": [[one.name, one.dim, list(one.rows)] for one in segment.tensors],
    }


def _difference(first: int, second: int, from_ranks: Sequence[Mapping[str, Any]]) -> str:
    ranks = first, second
    shares, segments = ([from_ranks[rank][key] for rank in ranks] for key in ("shares", "segments"))
    if shares[0] != shares[1]:
        return f"in shares=, {by_rank(shares, ranks)}"
    alone = [sorted(segments[here].keys() - segments[1 - here].keys()) for here in (0, 1)]
    if any(alone):
        only = [f"{', '.join(names)} only on rank {rank}" for rank, names in zip(ranks, alone, strict=True) if names]
        return f"there are segments of {'; of '.join(only)}"
    for name, fields in segments[0].items():
        for key in fields:
            values = [of_rank[name][key] for of_rank in segments]
            if values[0] != values[1]:
                return f"in {key} of the segment of {name}, {by_rank(values, ranks)}"
    return "in the order of their segments"
