"""What was measured of a pipeline in one iteration: seconds and bytes of every layer, and of the stages around them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from zeroresize.plan.partition import LayerTransfer, Partition
from zeroresize.policy.moves.move_cost import most_bytes
from zeroresize.policy.pipeline.pipeline_load import Floats, Indices


@dataclass(frozen=True)
class LayerProfile:
    """Describe one layer in one iteration.

    Attributes:
        forward_s, backward_s: seconds, of all micro-batches.
        weight_bytes: of parameters and buffers.
        gradient_bytes, optimizer_bytes: as they are at the end of the iteration.
        activation_bytes: kept for backward, of one micro-batch.
    """

    forward_s: float
    backward_s: float
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    @property
    def bytes_at_rest(self) -> int:
        """Return the bytes of weights, gradients and optimizer state: what travels with the layer."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class PipelineProfile:
    """Describe one iteration of a pipeline, known to every rank.

    Attributes:
        layers: [L].
        stage_s: wall seconds of the iteration on each stage.
        boundaries: in force in it.
        loss_s: seconds of the loss, forward and backward, on the last stage.
    """

    layers: tuple[LayerProfile, ...]
    stage_s: tuple[float, ...]
    boundaries: tuple[int, ...]
    loss_s: float = 0.0

    @property
    def layer_s(self) -> Floats:
        """Return [L, 2] seconds of each layer, forward and backward."""
        return np.array([[layer.forward_s, layer.backward_s] for layer in self.layers])

    @property
    def stages(self) -> Indices:
        """Return [L] on which stage each layer was."""
        return np.array(Partition(self.boundaries).stages)

    def bytes_of(self, transfers: Sequence[LayerTransfer]) -> float:
        """Return the bytes that the busiest stage sends or receives, by which a move is priced."""
        sent, received = ([0.0] * len(self.stage_s) for _ in range(2))
        for transfer in transfers:
            layer_bytes = float(self.layers[transfer.layer].bytes_at_rest)
            sent[transfer.source] += layer_bytes
            received[transfer.destination] += layer_bytes
        return most_bytes(sent, received)

    def with_layer_s(self, seconds: Floats) -> PipelineProfile:
        """Return the same with other seconds [L, 2] of layers, forward and backward."""
        layers = tuple(
            replace(layer, forward_s=forward_s, backward_s=backward_s)
            for layer, (forward_s, backward_s) in zip(self.layers, seconds.tolist(), strict=True)
        )
        return replace(self, layers=layers)

    @property
    def computed_s(self) -> tuple[float, ...]:
        """Return [S] seconds in which each stage computed its layers, and the last one the loss."""
        layer_s = [one.forward_s + one.backward_s for one in self.layers]
        stage_s = [math.fsum(layer_s[begin:end]) for begin, end in itertools.pairwise(self.boundaries)]
        return (*stage_s[:-1], stage_s[-1] + self.loss_s)

    @property
    def bubble_ratios(self) -> tuple[float, ...]:
        """Return [S] the share of the iteration in which each stage computed nothing of it, 0 to 1.

        The iteration lasts as long as on the stage where it takes longest.
        """
        step_s = max(self.stage_s)
        return tuple(max(1.0 - own / step_s, 0.0) if step_s else 0.0 for own in self.computed_s)

    @property
    def bubble_ratio(self) -> float:
        """Return the mean of the stages' :attr:`bubble_ratios`."""
        return math.fsum(self.bubble_ratios) / len(self.stage_s)

    @property
    def imbalance(self) -> float:
        """Return (L_max − L_min) / mean L of the stages' :attr:`computed_s` (DynMo, section 2); 0 without any load."""
        mean_s = math.fsum(self.computed_s) / len(self.stage_s)
        return (max(self.computed_s) - min(self.computed_s)) / mean_s if mean_s else 0.0
