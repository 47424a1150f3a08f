"""Every converted layer knows the segment that it lies in, or why its units stay evenly divided, alike on all ranks."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank, group_size, message_device
from zeroresize.integrations.find_segments import find_segments
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.local_parts import METHODS, guard_dtensors
from zeroresize.layers.segment import OwnedSegment, Segment, UnitTensor, held_at_home
from zeroresize.layers.segments import owned_segments
from zeroresize.layers.splitting import part_of_rank, whole_of_ranks
from zeroresize.layers.unit_dropout import why_not_keyable
from zeroresize.optim.shared_gradients import hand_out_gradients
from zeroresize.resharding.agreement import gather_texts, make_alike, meet_over
from zeroresize.resharding.data_parallel import unwrap
from zeroresize.resharding.parameter_state import replace_data
from zeroresize.resharding.state_dict_guards import guard_modules
from zeroresize.utils.texts import alike, at_fault, by_rank, lists_by_rank
from zeroresize.utils.torch_private import is_dtensor

logger = logging.getLogger(__name__)

#: What ranks agree on before they hold whole units of what torch has cut elsewhere, in words of an error.
WHOLE_UNITS = "the units that ranks are to hold whole"
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
    """
    if isinstance(named, Segment) or not all(isinstance(segment, Segment) for segment in named):
        raise ValueError(f"segments={named!r}: wanted is a list of zeroresize.Segment")
    segments, staying_even = find_segments(unwrap(model), layers, group_size(process_group), named)
    if any(segment.owned.block > 1 for segment in segments):
        hand_out_gradients()
    _hold_whole_units([each for each in segments if each.cut], process_group)
    reasons = why_not_keyable(unwrap(model), segments)
    for segment in segments:
        segment.modules[-1].extra = tuple(
            (where.owner, where.attribute, where.dim, sum(where.rows) * len(segment.owned.owners))
            for where in segment.tensors
            if not isinstance(where.owner, BalancedLinear)
        )
        if segment.name in reasons:
            staying_even |= dict.fromkeys(segment.layers, reasons[segment.name])
            continue
        for owner in (tensor.owner for tensor in segment.tensors if isinstance(tensor.owner, BalancedLinear)):
            owner.segment = segment
    guard_modules(segment for segment in segments if segment.name not in reasons)
    for name, reason in staying_even.items():
        layers[name].stays_even = reason
    log_staying_even(staying_even)


def _hold_whole_units(segments: Sequence[OwnedSegment], process_group: ProcessGroup) -> None:
    """Let ranks hold whole units of what torch has cut elsewhere, each parameter the object that it is; collective."""
    if not segments:
        return
    rank, device = group_rank(process_group), segments[0].tensors[0].parameter.device

    def plan() -> dict[str, Any]:
        for where in (tensor for segment in segments for tensor in segment.cut):
            if where.parameter.grad is not None:
                raise ValueError(f"{where.name} has a gradient, and ranks hold other rows of it now: convert before")
        return {segment.name: (segment.layers, segment.owned.counts) for segment in segments}

    make_alike(meet_over(process_group, device), plan, lambda made: made, WHOLE_UNITS)
    for segment in segments:
        cut = [(where, held_at_home(where, segment.owned)) for where in segment.cut]
        for where, (held, begins) in cut:
            local = part_of_rank(_whole(where, process_group), where.dim, where.owner.parts, held, rank, begins)
            replace_data(where.parameter, local, None)
            guard_dtensors([where.parameter], are_away=False, refused=METHODS)
        for where, at_home in cut:
            where.owner.divide_by(*at_home, where.block)
        segment.follow(rank)


def _whole(where: UnitTensor, process_group: ProcessGroup) -> Tensor:
    """What all ranks hold together of a parameter."""
    parameter: Any = where.parameter
    if is_dtensor(parameter):
        whole: Tensor = parameter.full_tensor()
        return whole
    return whole_of_ranks(parameter, where.dim, where.owner)


def log_staying_even(staying_even: Mapping[str, str]) -> None:
    """Log one line of level DEBUG for each reason why layers, by their names, stay evenly divided."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in staying_even.items():
        names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        logger.debug("%d layers stay evenly divided (%s): %s", len(names), first_of(names), reason)


def summary_of_segments(layers: Mapping[str, BalancedLinear]) -> str:
    """Return how many segments have units that can move, and how many layers stay, for a log line."""
    segments = [segment for segment in owned_segments(layers) if segment.may_give]
    kinds = Counter(segment.kind for segment in segments)
    of_kinds = f" ({', '.join(f'{count} of {kind}' for kind, count in kinds.items())})" if kinds else ""
    staying = [name for name, layer in layers.items() if layer.segment is None]
    movable = f"units of {len(segments)} segments can move{of_kinds}"
    if not staying:
        return movable
    return f"{movable}, and {len(staying)} layers stay evenly divided (level DEBUG tells why)"


def first_of(names: Sequence[str]) -> str:
    """Return the first few names, for a message."""
    return f"{', '.join(names[:_MOST_NAMED])}{', …' if names[_MOST_NAMED:] else ''}"


def require_same_segments(
    segments: Sequence[OwnedSegment],
    shares: Any,
    error: Exception | None,
    process_group: ProcessGroup,
    device: torch.device,
) -> None:
    """Check that all ranks found the same segments, and are to divide them alike, by ``shares``; collective.

    Args:
        error: what kept this rank from finding any.
        device: of the model.
    """
    segments_here = {segment.name: _described(segment) for segment in segments}
    text = json.dumps([None if error is None else str(error), shares, segments_here])
    texts = gather_texts(text, meet_over(process_group, device), process_group, message_device(process_group, device))
    if error is not None:
        raise error
    errors, shares_of, segments_of = zip(*map(json.loads, texts), strict=True)
    for rank, failure in enumerate(errors):
        if failure is not None:
            raise ValueError(f"nothing was divided, as rank {rank} of the group failed: {failure}")
    groups = alike(list(zip(shares_of, segments_of, strict=True)))
    if len(groups) > 1:
        raise ValueError(
            f"nothing was divided, as ranks of the group differ {_difference(shares_of, segments_of)}"
            f"{at_fault(groups)}. The same model, segments= and shares= are needed on every rank"
        )


def _described(segment: OwnedSegment) -> dict[str, Any]:
    return {
        "kind": segment.kind,
        "layers": list(segment.layers),
        "units": len(segment.owned.owners),
        "slices": segment.owned.slices,
        "quantum": segment.quantum,
        "min_units": segment.min_units,
        "on_change": segment.on_change is not None,
        "tensors": [[tensor.name, tensor.dim, list(tensor.rows), tensor.block] for tensor in segment.tensors],
    }


def _difference(shares: Sequence[Any], segments: Sequence[Mapping[str, Any]]) -> str:
    if len(alike(shares)) > 1:
        return f"in shares=, {by_rank(shares)}"
    names = list(map(list, segments))
    if len(alike(names)) > 1:
        return f"in the segments that they found, {lists_by_rank(names)}"
    for name, fields in segments[0].items():
        for key in fields:
            values = [of_rank[name][key] for of_rank in segments]
            if len(alike(values)) > 1:
                return f"in {key} of the segment of {name}, {by_rank(values)}"
    raise AssertionError("they are alike")
