"""search_segments(): every converted layer knows the segment that it lies in, or why its units stay evenly divided."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_size
from zeroresize.integrations.find_segments import find_segments
from zeroresize.integrations.keyed_dropout import why_not_keyable
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segment import Segment
from zeroresize.layers.segments import owned_segments
from zeroresize.resharding.data_parallel import unwrap
from zeroresize.resharding.state_dict_guards import guard_modules

logger = logging.getLogger(__name__)

#: So many layers a log line names.
_MOST_NAMED = 4


def search_segments(
    model: nn.Module, layers: Mapping[str, BalancedLinear], process_group: ProcessGroup, named: Sequence[Segment] = ()
) -> None:
    """Tell every layer in which segment it lies, or why it lies in none; lines of level DEBUG tell those reasons.

    A segment whose dropout cannot be keyed by the unit stays even in every mode: ranks that draw differently many
    random numbers would also drop different elements where all must drop the same.

    Args:
        model: holds the layers, wrapped by a host or not.
        layers: converted layers by name, with their even shares, in the order of the model.
        named: segments that the user names.

    Raises:
        ValueError: for a named segment that does not fit the model.
    """
    if isinstance(named, Segment) or not all(isinstance(one, Segment) for one in named):
        raise ValueError(f"segments={named!r}: wanted is a list of zeroresize.Segment")
    segments, staying_even = find_segments(unwrap(model), layers, group_size(process_group), named)
    reasons = why_not_keyable(unwrap(model), segments)
    for segment in segments:
        if segment.name in reasons:
            staying_even |= dict.fromkeys(segment.layers, reasons[segment.name])
            continue
        for name in segment.layers:
            layers[name].segment = segment
    guard_modules(segment for segment in segments if segment.name not in reasons)
    for name, reason in staying_even.items():
        layers[name].stays_even = reason
    log_staying_even(staying_even)


def log_staying_even(staying_even: Mapping[str, str]) -> None:
    """Log one line of level DEBUG for each reason why layers stay evenly divided.

    Args:
        staying_even: why units of layers stay evenly divided, by the layer's name.
    """
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in staying_even.items():
        names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        logger.debug("%d layers stay evenly divided (%s): %s", len(names), first_of(names), reason)


def summary_of_segments(layers: Mapping[str, BalancedLinear]) -> str:
    """Return how many segments have units that can move, how many layers stay, and the first reason, for a log line.

    Args:
        layers: converted layers by name, for which :func:`search_segments` was called.
    """
    segments = owned_segments(layers)
    kinds = Counter(segment.kind for segment in segments)
    of_kinds = f" ({', '.join(f'{count} of {kind}' for kind, count in kinds.items())})" if kinds else ""
    staying = [name for name, layer in layers.items() if layer.segment is None]
    movable = f"units of {len(segments)} segments can move{of_kinds}"
    if not staying:
        return movable
    reason = layers[staying[0]].stays_even
    why = "" if reason is None else f", as {staying[0]}: {reason}"
    return f"{movable}, and {len(staying)} layers stay evenly divided{why} (level DEBUG tells of all)"


def first_of(names: Sequence[str]) -> str:
    """Return the first few names, for a message."""
    return f"{', '.join(names[:_MOST_NAMED])}{', …' if names[_MOST_NAMED:] else ''}"
