"""What transformer layers take on a device, worked out from their shapes: for simulations, where nothing is measured.

``D`` hidden size, ``H`` heads of ``C`` features, ``F`` neurons of the feed-forward part, ``B`` rows of ``T`` tokens,
``t`` ranks of a tensor-parallel group.

A layer's seconds are those of its multiplications at a share of the device's peak, of the bytes that its other
operations move through memory, and of starting its kernels. Bytes that are kept are those of Korthikanti et al. (2022,
Reducing Activation Recomputation, Eq. 1 and 2), with 2 bytes an element. Attention keeps its scores, as Megatron-LM's
did in 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from zeroresize.policy.microbatches.costs import LayerGrid, grid_points
from zeroresize.policy.microbatches.plan import Floats, Indices

LayerKind = Literal["decoder-only", "encoder", "decoder", "embedding", "head"]
#: What is computed again in backwards.
RECOMPUTATIONS = ("none", "attention", "layers")


@dataclass(frozen=True)
class Device:
    """Describe a device.

    Attributes:
        peak_flops: of products in 16 bits, per second.
        efficiency: share of it that large products reach.
        bytes_per_s: of its memory.
        kernel_s: to start a kernel.
        link_bytes_per_s: of its links within a node, one way.
        memory_bytes: that it has.
    """

    peak_flops: float
    efficiency: float
    bytes_per_s: float
    kernel_s: float
    link_bytes_per_s: float
    memory_bytes: float


#: As of NVIDIA's data sheet of the A100 with 40 GB; the efficiency and the seconds of a kernel are typical, not the
#: sheet's.
A100 = Device(312e12, 0.55, 1.555e12, 5e-6, 300e9, 40e9)


@dataclass(frozen=True)
class TransformerShape:
    """Describe a model's layers.

    Attributes:
        hidden_size, num_heads, head_size, mlp_size: D, H, C, F.
        vocabulary: tokens of the embedding and the head.
    """

    hidden_size: int
    num_heads: int
    head_size: int
    mlp_size: int
    vocabulary: int = 32768

    def parameters(self, kind: LayerKind) -> int:
        """Return how many parameters a layer has."""
        if kind in ("embedding", "head"):
            return self.vocabulary * self.hidden_size
        attention = 4 * self.hidden_size * self.num_heads * self.head_size
        mlp = 2 * self.hidden_size * self.mlp_size
        return mlp + attention * (2 if kind == "decoder" else 1)


def transformer_grid(
    shape: TransformerShape,
    kind: LayerKind,
    sizes: tuple[int, ...],
    lengths: tuple[tuple[int, ...], ...],
    *,
    tensor_parallel: int = 1,
    recomputation: str = "none",
    axis: int = 0,
) -> LayerGrid:
    """Return a layer's costs on a grid.

    Args:
        lengths: of a "decoder" of an encoder-decoder model those of source and target, else one.
        tensor_parallel: t; heads and neurons are divided, and two all-reduces each way are added.
        recomputation: of :data:`RECOMPUTATIONS`.
        axis: which of a sample's lengths a layer with one sees.
    """
    points = grid_points(sizes, lengths)
    values = _values(shape, kind, *points, A100, tensor_parallel, recomputation)
    table_shape = (len(sizes), *map(len, lengths))
    axes = (0, 1) if kind == "decoder" else (axis,)
    return LayerGrid(axes, sizes, lengths, *(each.reshape(table_shape) for each in values))


def _values(
    shape: TransformerShape,
    kind: LayerKind,
    sizes: Indices,
    lengths: Indices,
    device: Device,
    t: int,
    recomputation: str,
) -> tuple[Floats, Floats, Floats, Floats]:
    rows, length = sizes.astype(np.float64), lengths[:, -1].astype(np.float64)
    tokens = rows * length
    width, inner = shape.hidden_size, shape.num_heads * shape.head_size / t
    if kind in ("embedding", "head"):
        flops = 2.0 * tokens * width * shape.vocabulary / t * (kind == "head")
        moved = 2.0 * tokens * (width + (shape.vocabulary / t if kind == "head" else 0.0)) * 2.0
        kept = 2.0 * tokens * (width + (2.0 * shape.vocabulary / t if kind == "head" else 0.0))
        forward_s = _seconds(flops, moved, 4, device)
        workspace = kept if kind == "head" else 0.0 * kept
        return forward_s, _seconds(2.0 * flops, 2.0 * moved, 6, device), kept, workspace
    mlp_flops = 4.0 * tokens * width * shape.mlp_size / t
    attentions = [(length, length)]
    if kind == "decoder":
        attentions.append((length, lengths[:, 0].astype(np.float64)))
    flops, core_flops, scores = mlp_flops, 0.0 * tokens, 0.0 * tokens
    for query, key in attentions:
        flops = flops + 4.0 * rows * (query + key) * width * inner
        core_flops = core_flops + 4.0 * rows * query * key * inner
        scores = scores + rows * query * key * shape.num_heads / t
    score_bytes = 5.0 * scores
    elementwise = tokens * (len(attentions) * (7.0 * width + 6.0 * inner) + 9.0 * width + 4.0 * shape.mlp_size / t)
    forward_moved = 2.0 * elementwise + 10.0 * scores
    num_kernels = 12 + 8 * len(attentions)
    forward_s = _seconds(flops + core_flops, forward_moved, num_kernels, device)
    core_s = _seconds(core_flops, 10.0 * scores, 5 * len(attentions), device)
    backward_s = _seconds(2.0 * (flops + core_flops), 2.0 * forward_moved, 2 * num_kernels, device)
    if t > 1:
        reduced = 2.0 * (t - 1) / t * (2.0 * tokens * width) / device.link_bytes_per_s
        forward_s = forward_s + (1 + len(attentions)) * reduced
        backward_s = backward_s + (1 + len(attentions)) * reduced
    kept = tokens * (10.0 * width + len(attentions) * 8.0 * inner + 4.0 * shape.mlp_size / t) + score_bytes
    kept = kept + (len(attentions) - 1) * tokens * 5.0 * width
    workspace = 4.0 * tokens * max(shape.mlp_size / t, inner) + score_bytes
    if recomputation == "attention":
        return forward_s, backward_s + core_s, kept - score_bytes, workspace + score_bytes
    if recomputation == "layers":
        return forward_s, backward_s + forward_s, 2.0 * tokens * width * len(attentions), workspace + kept
    return forward_s, backward_s, kept, workspace


def _seconds(flops: Floats, moved_bytes: Floats | float, num_kernels: int, device: Device) -> Floats:
    seconds: Floats = flops / (device.efficiency * device.peak_flops) + moved_bytes / device.bytes_per_s
    return seconds + num_kernels * device.kernel_s
