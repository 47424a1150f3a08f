"""The models of DynaPipe's Table 1 on modelled A100s, for benchmarks that plan and simulate: no device is asked.

``D`` hidden size, ``H`` heads of ``C`` features, ``F`` neurons of the feed-forward part, ``B`` rows of ``T`` tokens,
``S`` stages.

A layer's seconds are those of its multiplications at a share of the device's peak, of the bytes that its other
operations move through memory, and of starting its kernels. Bytes that are kept are those of Korthikanti et al. (2022,
Reducing Activation Recomputation, Eq. 1 and 2), with 2 bytes an element. Attention keeps its scores, as Megatron-LM's
did in 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lm_examples.task_lengths import mini_batch_of_pairs
from zeroresize.policy.microbatches.costs import LayerGrid, StageCosts, grid_points, powers_of_two
from zeroresize.policy.microbatches.plan import Floats, Indices

LayerKind = Literal["decoder-only", "encoder", "decoder", "embedding", "head"]
#: Of an A100 by NVIDIA's data sheet: products in 16 bits and bytes of memory, per second. The share of the former that
#: large products reach, and the seconds to start a kernel, are typical ones.
_PEAK_FLOPS, _EFFICIENCY, _BYTES_PER_S, _KERNEL_S = 312e12, 0.55, 1.555e12, 5e-6
_VOCABULARY, _MOST_ROWS = 32768, 256
#: Targets are cut at a quarter of the sources' limit.
_TARGET_SHARE = 4


@dataclass(frozen=True)
class PaperModel:
    """Describe a model of Table 1.

    Attributes:
        kind: "gpt", decoder-only, or "t5", an encoder and a decoder.
        num_blocks: of a decoder-only model, or of either half.
        hidden_size, num_heads, head_size, mlp_size: D, H, C, F.
    """

    kind: Literal["gpt", "t5"]
    num_blocks: int
    hidden_size: int
    num_heads: int
    head_size: int
    mlp_size: int

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return the kinds of all layers."""
        if self.kind == "gpt":
            return ("embedding", *("decoder-only",) * self.num_blocks, "head")
        return ("embedding", *("encoder",) * self.num_blocks, *("decoder",) * self.num_blocks, "head")


#: Those that the paper trains on 8 devices.
MODELS = {"gpt": PaperModel("gpt", 32, 4096, 32, 128, 16384), "t5": PaperModel("t5", 24, 1024, 128, 128, 65536)}


def costs_of(model: PaperModel, num_stages: int, longest: int) -> StageCosts:
    """Return what S stages take that have equally many blocks; the embedding is on the first, the head on the last."""
    num_blocks = len(model.layer_kinds) - 2
    inner = (1 + num_blocks // num_stages * stage for stage in range(1, num_stages))
    grids = {kind: _grid(model, kind, longest) for kind in dict.fromkeys(model.layer_kinds)}
    return StageCosts(model.layer_kinds, grids, (0, *inner, num_blocks + 2))


def _grid(model: PaperModel, kind: LayerKind, longest: int) -> LayerGrid:
    """A layer's costs by the rows of a micro-batch and their lengths: of source, target, or in a decoder both."""
    of_sources, of_targets = powers_of_two(longest, min(32, longest)), powers_of_two(_longest_target(longest), 8)
    if kind == "decoder":
        axes, lengths = (0, 1), (of_sources, of_targets)
    else:
        axis = 1 if kind == "head" and model.kind == "t5" else 0
        axes, lengths = (axis,), (of_targets if axis else of_sources,)
    sizes = powers_of_two(_MOST_ROWS)
    values = _values(model, kind, *grid_points(sizes, lengths))
    table_shape = (len(sizes), *map(len, lengths))
    return LayerGrid(axes, sizes, lengths, *(each.reshape(table_shape) for each in values))


def _values(model: PaperModel, kind: LayerKind, sizes: Indices, lengths: Indices) -> tuple[Floats, ...]:
    """Seconds of forward and backward, bytes that are kept, and bytes of the workspace, at every point of a grid."""
    rows, length = sizes.astype(np.float64), lengths[:, -1].astype(np.float64)
    tokens = rows * length
    width, inner = model.hidden_size, model.num_heads * model.head_size
    if kind in ("embedding", "head"):
        flops = 2.0 * tokens * width * _VOCABULARY * (kind == "head")
        moved = 2.0 * tokens * (width + (_VOCABULARY if kind == "head" else 0.0)) * 2.0
        kept = 2.0 * tokens * (width + (2.0 * _VOCABULARY if kind == "head" else 0.0))
        workspace = kept if kind == "head" else 0.0 * kept
        return _seconds(flops, moved, 4), _seconds(2.0 * flops, 2.0 * moved, 6), kept, workspace
    attentions = [(length, length)]
    if kind == "decoder":
        attentions.append((length, lengths[:, 0].astype(np.float64)))
    flops, core_flops, scores = 4.0 * tokens * width * model.mlp_size, 0.0 * tokens, 0.0 * tokens
    for query, key in attentions:
        flops = flops + 4.0 * rows * (query + key) * width * inner
        core_flops = core_flops + 4.0 * rows * query * key * inner
        scores = scores + rows * query * key * model.num_heads
    score_bytes = 5.0 * scores
    elementwise = tokens * (len(attentions) * (7.0 * width + 6.0 * inner) + 9.0 * width + 4.0 * model.mlp_size)
    moved = 2.0 * elementwise + 10.0 * scores
    num_kernels = 12 + 8 * len(attentions)
    forward_s = _seconds(flops + core_flops, moved, num_kernels)
    backward_s = _seconds(2.0 * (flops + core_flops), 2.0 * moved, 2 * num_kernels)
    kept = tokens * (10.0 * width + len(attentions) * 8.0 * inner + 4.0 * model.mlp_size) + score_bytes
    kept = kept + (len(attentions) - 1) * tokens * 5.0 * width
    return forward_s, backward_s, kept, 4.0 * tokens * max(model.mlp_size, inner) + score_bytes


def _seconds(flops: Floats, moved_bytes: Floats, num_kernels: int) -> Floats:
    return flops / (_EFFICIENCY * _PEAK_FLOPS) + moved_bytes / _BYTES_PER_S + num_kernels * _KERNEL_S


def batches_of(model: PaperModel, tokens: int, longest: int, number: int) -> list[Indices]:
    """Return lengths of FLAN-like mini-batches."""
    is_joined = model.kind == "gpt"
    return [
        mini_batch_of_pairs(
            tokens,
            longest,
            np.random.default_rng([0, batch]),
            joined=is_joined,
            max_target=None if is_joined else _longest_target(longest),
        )
        for batch in range(number)
    ]


def row_lengths(model: PaperModel, longest: int) -> tuple[int, ...]:
    """Return the tokens of a row that packing fills."""
    return (longest,) if model.kind == "gpt" else (longest, _longest_target(longest))


def _longest_target(longest: int) -> int:
    return max(longest // _TARGET_SHARE, 2)


def powers(most: int, least: int = 1) -> Sequence[int]:
    """Return the powers of two from ``least`` to ``most``."""
    return [least * 2**power for power in range(int(np.log2(most / least)) + 1)]
