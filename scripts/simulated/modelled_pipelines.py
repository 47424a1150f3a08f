"""The models of DynaPipe's Table 1 on modelled A100s, for benchmarks that plan and simulate: no device is asked.

``D`` replicas, ``T`` ranks of a tensor-parallel group, ``S`` stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lm_examples.task_lengths import mini_batch_of_pairs
from scripts.simulated.transformer_costs import A100, RECOMPUTATIONS, LayerKind, TransformerShape, transformer_grid
from zeroresize.policy.microbatches.costs import LayerGrid, StageCosts, powers_of_two
from zeroresize.policy.microbatches.plan import Indices

#: Bytes of a parameter: weights and gradients in 16 bits; masters and Adam's state, shared by the replicas (ZeRO-1).
_HELD_BYTES, _SHARED_BYTES = 4.0, 12.0
#: Of a device's memory, what training may take.
_USABLE = 0.92
#: Targets are cut at a quarter of the sources' limit.
TARGET_SHARE = 4


@dataclass(frozen=True)
class PaperModel:
    """Describe a model of Table 1: blocks of a decoder-only model, or of either half."""

    kind: str
    num_blocks: int
    shape: TransformerShape

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return the kinds of all layers."""
        if self.kind == "gpt":
            return ("embedding", *("decoder-only",) * self.num_blocks, "head")
        return ("embedding", *("encoder",) * self.num_blocks, *("decoder",) * self.num_blocks, "head")


def paper_model(kind: str, num_devices: int) -> PaperModel:
    """Return the model that the paper trains on so many devices (Table 1)."""
    if kind == "gpt":
        blocks, width, heads, neurons = {
            4: (16, 4096, 32, 16384),
            8: (32, 4096, 32, 16384),
            16: (40, 5140, 40, 20560),
            32: (16, 12288, 96, 49152),
        }[num_devices]
        return PaperModel(kind, blocks, TransformerShape(width, heads, 128, neurons))
    blocks = {4: 12, 8: 24, 16: 48, 32: 96}[num_devices]
    return PaperModel(kind, blocks, TransformerShape(1024, 128, 128, 65536))


@dataclass(frozen=True)
class Division:
    """Describe how a model is spread over devices.

    Attributes:
        memory_limit: bytes of a device that are left for activations.
        reduction_s: seconds in which replicas sum their gradients.
    """

    dp: int
    tp: int
    pp: int
    boundaries: tuple[int, ...]
    memory_limit: float
    reduction_s: float

    def __str__(self) -> str:
        return f"({self.dp}, {self.tp}, {self.pp})"


def divisions(model: PaperModel, num_devices: int) -> Iterator[Division]:
    """Yield all powers of two of (D, T, S) whose weights fit, with T of at most a node of 8."""
    degrees = [2**power for power in range(int(np.log2(num_devices)) + 1)]
    for tp, pp in itertools.product(degrees, degrees):
        num_blocks = len(model.layer_kinds) - 2
        if tp * pp > num_devices or tp > 8 or num_blocks % pp:
            continue
        dp = num_devices // (tp * pp)
        boundaries = even_boundaries(model, pp)
        parameters = max(
            sum(model.shape.parameters(kind) for kind in model.layer_kinds[begin:end]) / tp
            for begin, end in itertools.pairwise(boundaries)
        )
        left = _USABLE * A100.memory_bytes - parameters * (_HELD_BYTES + _SHARED_BYTES / dp)
        if left > 0.0:
            reduction_s = 2.0 * (dp - 1) / dp * 2.0 * parameters / A100.link_bytes_per_s
            yield Division(dp, tp, pp, boundaries, left, reduction_s)


def even_boundaries(model: PaperModel, num_stages: int) -> tuple[int, ...]:
    """Return [S + 1] with equally many blocks on each stage, the embedding on the first, the head on the last."""
    num_blocks = len(model.layer_kinds) - 2
    inner = [1 + num_blocks // num_stages * stage for stage in range(1, num_stages)]
    return (0, *inner, num_blocks + 2)


def pipeline_of(model: PaperModel, num_stages: int) -> Division:
    """Return one replica of so many stages, as if memory had no end."""
    return Division(1, 1, num_stages, even_boundaries(model, num_stages), math.inf, 0.0)


def costs_of(model: PaperModel, division: Division, longest: int) -> Mapping[str, StageCosts]:
    """Return what stages take, by what is computed again."""
    return {
        way: StageCosts(model.layer_kinds, _grids(model, division.tp, longest, way), division.boundaries)
        for way in RECOMPUTATIONS
    }


@lru_cache(maxsize=256)
def _grids(model: PaperModel, tp: int, longest: int, way: str) -> Mapping[str, LayerGrid]:
    grids = {}
    for kind in dict.fromkeys(model.layer_kinds):
        least = min(32, longest)
        lengths = [powers_of_two(longest, least)]
        if kind == "decoder":
            lengths.append(powers_of_two(max(longest // TARGET_SHARE, 2), 8))
        axis = 1 if kind == "head" and model.kind == "t5" else 0
        if axis:
            lengths = [powers_of_two(max(longest // TARGET_SHARE, 2), 8)]
        recomputation = way if kind in ("decoder-only", "encoder", "decoder") else "none"
        grids[kind] = transformer_grid(
            model.shape,
            kind,
            powers_of_two(256),
            tuple(lengths),
            tensor_parallel=tp,
            recomputation=recomputation,
            axis=axis,
        )
    return grids


def batches_of(model: PaperModel, tokens: int, longest: int, number: int, seed: int = 0) -> list[Indices]:
    """Return lengths of FLAN-like mini-batches."""
    is_joined = model.kind == "gpt"
    return [
        mini_batch_of_pairs(
            tokens,
            longest,
            np.random.default_rng([seed, batch]),
            joined=is_joined,
            max_target=None if is_joined else max(longest // TARGET_SHARE, 2),
        )
        for batch in range(number)
    ]


def row_lengths(model: PaperModel, longest: int) -> tuple[int, ...]:
    """Return the tokens of a row that packing fills."""
    return (longest,) if model.kind == "gpt" else (longest, max(longest // TARGET_SHARE, 2))


def powers(most: int, least: int = 1) -> Sequence[int]:
    """Return the powers of two from ``least`` to ``most``."""
    return [least * 2**power for power in range(int(np.log2(most / least)) + 1)]
