"""Costs of a model's layers, measured where they lie: each stage its layers, whatever divides them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence

import numpy as np

from zeroresize.comm.collectives import group_rank
from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.microbatch.cost_table import CostTable
from zeroresize.microbatch.profile import ProfiledShapes, device_name, handed_by, kinds_of, measure_layers, num_points
from zeroresize.policy.microbatches.grid_costs import LayerGrid
from zeroresize.resharding.agreement import meet_over
from zeroresize.runtime.activations import BatchOf
from zeroresize.runtime.counted_loss import Loss
from zeroresize.strategy.model import SwitchableModel
from zeroresize.utils.codec import decoded, encoded

logger = logging.getLogger(__name__)


def measure_model(
    model: SwitchableModel,
    batch_of: BatchOf,
    shapes: ProfiledShapes,
    *,
    loss: Loss,
    recomputations: Sequence[str] = ("none", "layers"),
) -> CostTable:
    """Measure the layers under the strategy in force, and bring the stages' numbers together; collective.

    Ranks that divide a layer measure it together. Of a kind that several ranks have the slowest counts at each point,
    so that all ranks get the same table. That may take minutes: rank 0 logs how much is measured, and how long it took.

    The fastest of three repetitions counts. Where memory does not hold a point, it is never planned. Gradients are
    dropped.

    Args:
        batch_of: a micro-batch of given sizes, by the names of ``shapes``, on the device that is the default, if that
            is meta, and on the model's device else.
        loss: of the last layer's output and its micro-batch, counted with the last layer.
        recomputations: of what is computed again in backwards; "attention" needs modules with an attribute
            ``recompute``.

    Raises:
        ValueError: for another recomputation, and as :func:`~zeroresize.runtime.activations.find_activations`.
    """
    begin, whole = time.perf_counter(), model.whole_layers
    is_first = group_rank(model.process_group) == 0
    if is_first:
        logger.info(
            "measuring costs: %d kinds of layers for up to %d shapes of micro-batches and %d ways of recomputation; "
            "keep them with table.save(path)",
            len(set(kinds_of(whole))),
            num_points(shapes),
            len(recomputations),
        )
    layers = {} if model.position is None else model.stage_layers
    meet = meet_over(model.groups_of(model.current).tp, model.device)
    measured, activations = measure_layers(
        layers,
        whole,
        batch_of,
        shapes,
        loss=loss,
        recomputations=recomputations,
        device=model.device,
        slowest=lambda seconds: max(each for each, _ in meet(seconds, 0.0)),
    )
    model.drop_gradients()
    texts = Rendezvous(model.process_group, "measure costs of layers").exchange("costs", json.dumps(encoded(measured)))
    grids: dict[str, dict[str, LayerGrid]] = {way: {} for way in recomputations}
    for text in texts:
        for way, by_kind in json.loads(text).items():
            for kind, value in by_kind.items():
                grid = decoded(LayerGrid, value, "grid")
                known = grids[way].get(kind)
                grids[way][kind] = grid if known is None else _slower(known, grid)
    if is_first:
        logger.info("measured costs in %.0f s", time.perf_counter() - begin)
    return CostTable(kinds_of(whole), shapes.names, grids, device_name(model.device), handed_by(activations))


def _slower(first: LayerGrid, other: LayerGrid) -> LayerGrid:
    values = [
        np.maximum(getattr(first, name), getattr(other, name))
        for name in ("forward_s", "backward_s", "activation_bytes", "workspace_bytes")
    ]
    return LayerGrid(first.axes, first.sizes, first.lengths, *values)
