"""Random numbers that are drawn between the layers of a segment leave the ranks' generators alike behind it.

Ranks that own other numbers of units draw other numbers of random numbers there, and must then drop the same elements
of what is replicated. So between these layers generators draw from a stream of its own, which begins alike on all
ranks; behind them they go on where they stood, or one number further if anything was drawn.

A stream is known by its seed, which a generator tells. Activation checkpointing brings back states, and so the stream
in which a part was first computed, wherever that begins and ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroresize.layers.segment import OwnedSegment
from zeroresize.utils.hashing import mixed

#: Streams of which it is known what lies behind them, for forwards that are computed again.
_REMEMBERED = 4096


@dataclass(frozen=True)
class _Stream:
    """Where the generators stood before it and at its beginning, whose row-parallel layers are to come, and whether
    anything was drawn since the generators stood there.
    """

    outside: list[Tensor]
    beginning: list[Tensor]
    segments: frozenset[int]
    has_drawn: bool


_streams: OrderedDict[int, _Stream] = OrderedDict()
_are_forced = False


def follow_draws(segment: OwnedSegment, *, is_column_parallel: bool, device: torch.device) -> None:
    """Begin a stream before a segment's column-parallel layer, and end it before its row-parallel one, while away."""
    if segment.owned.is_home and not _are_forced:
        return
    seed = torch.default_generator.initial_seed()
    stream = _streams.get(seed)
    generators = _generators(device)
    if stream is None:
        if is_column_parallel:
            states = [one.get_state() for one in generators]
            _begin(_drawn(), states, frozenset([id(segment)]), False, generators)
        return
    segments = stream.segments | {id(segment)} if is_column_parallel else stream.segments - {id(segment)}
    if segments == stream.segments and not is_column_parallel:  # what reads x there may have drawn for its own units
        return
    has_drawn = stream.has_drawn or (0 in segment.owned.counts and not _are_forced)  # who has no units draws nothing
    has_drawn = has_drawn or not all(
        torch.equal(generator.get_state(), state) for generator, state in zip(generators, stream.beginning, strict=True)
    )
    if segments:
        _begin(mixed(seed, len(segments)), stream.outside, segments, has_drawn, generators)
        return
    for generator, state in zip(generators, stream.outside, strict=True):
        generator.set_state(state)
    if has_drawn:
        _drawn()


def is_within_segment() -> bool:
    """Return whether what is drawn now is drawn from the stream of a segment."""
    return torch.default_generator.initial_seed() in _streams


@contextmanager
def streams_of_all() -> Iterator[None]:
    """Let segments at even shares draw from streams, too, while the block lasts."""
    global _are_forced
    _are_forced = True
    try:
        yield
    finally:
        _are_forced = False


def _begin(
    seed: int, outside: list[Tensor], segments: frozenset[int], has_drawn: bool, generators: list[torch.Generator]
) -> None:
    for generator in generators:
        generator.manual_seed(seed)
    beginning = [one.get_state() for one in generators]
    _streams[seed] = _Stream(outside, beginning, segments, has_drawn)
    _streams.move_to_end(seed)
    if len(_streams) > _REMEMBERED:
        _streams.popitem(last=False)


def _drawn() -> int:
    return int(torch.randint(1 << 62, (), device="cpu"))


def _generators(device: torch.device) -> list[torch.Generator]:
    """The CPU's, whose seed tells the stream, and the device's."""
    return [torch.default_generator, *([torch.cuda.default_generators[device.index]] if device.type == "cuda" else [])]
