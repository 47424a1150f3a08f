"""A divided model beside the undivided one, with the same batch: losses, gradients, and where they begin to differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from zeroresize.checks.divided import Part
from zeroresize.checks.finding import REFERENCE, ParallelFinding, finding
from zeroresize.checks.ranks import Ranks
from zeroresize.checks.recording import Recorder, are_alike


def find_differences(
    losses: tuple[float, float],
    recorders: tuple[Recorder, Recorder],
    parts: Sequence[Part],
    gradients: Mapping[str, Tensor | None],
    reference: nn.Module,
    expected: Mapping[str, Tensor],
    ranks: Ranks,
    tolerance: float,
) -> list[ParallelFinding]:
    """Find the first module whose output differs where the losses do, else parameters whose gradients do.

    Args:
        losses, recorders: of the divided model and of the reference.
        gradients: what this rank holds of the divided model's.
        expected: the reference's gradients, whole.
    """
    if max(ranks.share(abs(losses[0] - losses[1]))) > tolerance * max(1.0, abs(losses[1])):
        known = {key: (inputs, outputs) for key, _, operation, inputs, outputs in recorders[1].events if not operation}
        layer = next(
            (
                module
                for key, module, operation, inputs, outputs in recorders[0].events
                if not operation and key in known and inputs and are_alike(inputs, known[key][0], tolerance)
                if [row[0] for row in outputs] == [row[0] for row in known[key][1]]
                if not are_alike(outputs, known[key][1], tolerance)
            ),
            "",
        )
        what = f"the loss is {losses[0]:.8g}, and the reference's {losses[1]:.8g}"
        where = "; this layer is the first that reads the same and returns other values"
        detail, layer = ranks.share([what + (where if layer else ""), layer])[0]
        return [finding(REFERENCE, detail, layer=layer, operation="forward")]
    values = dict(reference.named_parameters())
    wrong = {}
    least = tolerance * max((float(one.norm()) for one in expected.values()), default=0.0)
    for part in parts:
        gradient, whole = gradients.get(part.name), expected.get(part.name)
        if gradient is None or whole is None:
            continue
        shape = part.local.shape
        dims = [dim for dim in range(whole.ndim) if len(shape) == whole.ndim and shape[dim] < whole.shape[dim]]
        for dim in dims[:1]:
            starts = range(0, whole.shape[dim], shape[dim]) if shape[dim] else ()
            places = (slice(None),) * dim
            fits = [slice(at, at + shape[dim]) for at in starts]
            fits = [at for at in fits if _is_equal(values[part.name].detach()[(*places, at)], part.local)]
            whole = whole[(*places, fits[0])] if len(fits) == 1 else None
        if whole is not None and whole.shape == gradient.shape:
            difference = float((whole - gradient).norm())
            if difference > tolerance * float(whole.norm()) + least:
                wrong[part.name] = (
                    f"its gradient differs from the reference's by {difference / float(whole.norm()):.1e}"
                )
    of_ranks = ranks.share(wrong)
    first = next(((name, detail) for table in of_ranks for name, detail in table.items()), None)
    return [] if first is None else [finding(REFERENCE, first[1], parameter=first[0], operation="backward")]


def _is_equal(values: Tensor, others: Tensor) -> bool:
    return values.shape == others.shape and torch.equal(values.to(others.dtype), others)
