"""key_dropout(): dropout within segments whose masks do not depend on who owns a unit."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

from torch import nn

from zeroresize.comm.collectives import group_rank
from zeroresize.layers.segment import OwnedSegment
from zeroresize.layers.unit_dropout import UnitDropout, mixed
from zeroresize.utils.torch_private import children_of


def key_dropout(model: nn.Module, segments: Sequence[OwnedSegment], *, seed: int) -> dict[str, str]:
    """Replace dropout modules with p > 0 between the layers of ``segments`` by :class:`UnitDropout`, in place.

    Args:
        model: holds the segments, without a host's wrappers.
        seed: the same on all ranks of the tensor-parallel group, another one on each replica of the model.

    Returns:
        For segments in which other dropout remains, by name, why: its masks depend on which rank owns a unit.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, child in children_of(module).items():
            if child is not None:
                places.setdefault(id(child), []).append((module, attribute))
    uses = Counter(id(dropout) for segment in segments for dropout, _ in segment.dropouts)
    left: dict[str, str] = {}
    for segment in segments:
        if segment.has_other_dropout:
            left[segment.name] = "it drops elements in a function, a fused attention or a module that is used elsewhere"
        for number, (dropout, dim) in enumerate(segment.dropouts):
            if isinstance(dropout, UnitDropout):  # of a segment that was found before
                dropout.segment = segment
            if not isinstance(dropout, nn.Dropout) or dropout.p == 0.0:
                continue
            if uses[id(dropout)] > 1 or len(places[id(dropout)]) > 1:
                left[segment.name] = "its dropout module stands at several places of the model"
                continue
            rank = group_rank(segment.modules[-1].process_group)
            own_seed = mixed(seed, zlib.crc32(f"{segment.name}/{number}".encode()))
            keyed = UnitDropout(dropout.p, segment, rank, dim=dim, seed=own_seed)
            ((parent, attribute),) = places[id(dropout)]
            setattr(parent, attribute, keyed.train(dropout.training))
            segment.dropouts = tuple((keyed if one is dropout else one, where) for one, where in segment.dropouts)
    return left
