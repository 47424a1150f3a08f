"""Dropout within segments whose masks do not depend on who owns a unit, for as long as a balancer works."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

from torch import nn

from zeroresize.comm.collectives import group_rank
from zeroresize.layers.segment import OwnedSegment
from zeroresize.layers.unit_dropout import UnitDropout
from zeroresize.utils.hashing import mixed
from zeroresize.utils.torch_private import children_of

_Places = dict[int, list[tuple[nn.Module, str]]]


def drops(segment: OwnedSegment) -> bool:
    """Tell whether something between the layers drops elements, in training, by random numbers that are not keyed."""
    return segment.has_other_dropout or any(
        getattr(dropout, "p", 0.0) for dropout, _ in segment.dropouts if not isinstance(dropout, UnitDropout)
    )


def why_not_keyable(model: nn.Module, segments: Sequence[OwnedSegment]) -> dict[str, str]:
    """Tell, by name, why :class:`KeyedDropout` cannot replace a segment's dropout: its units must stay even.

    Args:
        model: holds the segments, without a host's wrappers.
    """
    places = _places(model)
    uses = Counter(id(dropout) for segment in segments for dropout, _ in segment.dropouts)
    reasons: dict[str, str] = {}
    for segment in segments:
        if segment.has_other_dropout:
            reasons[segment.name] = (
                "it drops elements in a function, a fused attention or a module that is used elsewhere"
            )
        for dropout, _ in segment.dropouts:
            stands_twice = uses[id(dropout)] > 1 or len(places.get(id(dropout), ())) > 1
            if isinstance(dropout, nn.Dropout) and dropout.p and stands_twice:
                reasons[segment.name] = "its dropout module stands at several places of the model"
    return reasons


class KeyedDropout:
    """Replaces dropout modules with p > 0 between the layers of ``segments`` by :class:`UnitDropout`, in place.

    Args:
        model: holds the segments, without a host's wrappers.
        segments: of the kind that :func:`why_not_keyable` names no reason for.
        seed: the same on all ranks of the tensor-parallel group, another one on each replica of the model.
    """

    def __init__(self, model: nn.Module, segments: Sequence[OwnedSegment], *, seed: int) -> None:
        self._segments, self._seed = segments, seed
        places = _places(model)
        self._keyed: list[tuple[UnitDropout, OwnedSegment, int, nn.Module, str]] = []
        for segment in segments:
            for number, (dropout, _) in enumerate(segment.dropouts):
                if isinstance(dropout, UnitDropout) or (isinstance(dropout, nn.Dropout) and dropout.p):
                    self._key(segment, number, *places[id(dropout)][0])

    def _key(self, segment: OwnedSegment, number: int, parent: nn.Module, attribute: str) -> None:
        dropout, dim = segment.dropouts[number]
        if isinstance(dropout, UnitDropout):  # whoever put it there was not closed, or left units away
            keyed = dropout
            keyed.segment = segment
        else:
            assert isinstance(dropout, nn.Dropout)
            rank = group_rank(segment.modules[-1].process_group)
            seed = mixed(self._seed, zlib.crc32(f"{segment.name}/{number}".encode()))
            keyed = UnitDropout(dropout.p, segment, rank, dim=dim, seed=seed, replaces=dropout)
            keyed.resume(segment.dropout_calls.get(number, 0))
            setattr(parent, attribute, keyed.train(dropout.training))
            _set_dropout(segment, number, keyed)
        self._keyed.append((keyed, segment, number, parent, attribute))

    def close(self) -> None:
        """Put the modules back that were replaced, but for those of segments whose units are away.

        There a mask by each rank's own random numbers would be another one on every owner.
        """
        for keyed, segment, number, parent, attribute in self._keyed:
            replaced = keyed.replaced
            if replaced is None or not segment.owned.is_even or segment.dropouts[number][0] is not keyed:
                continue
            segment.dropout_calls[number] = keyed.num_calls
            _set_dropout(segment, number, replaced)
            if children_of(parent).get(attribute) is keyed:
                setattr(parent, attribute, replaced.train(keyed.training))
        self._keyed = []


def _set_dropout(segment: OwnedSegment, number: int, module: nn.Module) -> None:
    dropouts = list(segment.dropouts)
    dropouts[number] = module, dropouts[number][1]
    segment.dropouts = tuple(dropouts)


def _places(model: nn.Module) -> _Places:
    """Return where each module stands: the modules that hold it, and under which names."""
    places: _Places = {}
    for module in model.modules():
        for attribute, child in children_of(module).items():
            if child is not None:
                places.setdefault(id(child), []).append((module, attribute))
    return places
