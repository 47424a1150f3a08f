"""A divided model beside the undivided one, with the same batch: their losses, and where they begin to differ.

A gradient needs no reference: it is measured by differences of the loss.
"""

from __future__ import annotations

from zeroresize.checks.finding import REFERENCE, ParallelFinding, finding
from zeroresize.checks.recording import Recorder, are_alike
from zeroresize.resharding.ranks import Ranks


def find_differences(
    losses: tuple[float, float], recorders: tuple[Recorder, Recorder], ranks: Ranks, tolerance: float
) -> list[ParallelFinding]:
    """Find the first module that returns something else than the reference's, where the losses differ.

    Args:
        losses, recorders: of the divided model and of the reference.
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
    return []
