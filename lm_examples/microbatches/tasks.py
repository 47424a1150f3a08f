"""Samples of many tasks, of very different lengths: runs of a text, and what is to be said of them.

Lengths are like those of FLANv2 (:mod:`lm_examples.task_lengths`). A decoder-only model learns to continue a
run of the text. An encoder-decoder model is given a run of it as source, and learns to say its beginning, its beginning
reversed, or what follows it; the first token of the source says which.

A mini-batch depends on the seed and the iteration alone. Its lengths are drawn before and without its contents, so that
planners need no text. ``N`` samples, ``A`` lengths of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lm_examples.data import Files
from lm_examples.task_lengths import mini_batch_of_pairs
from zeroresize.policy.microbatches.plan import MicroBatch, shapes_of

#: Says of a source what its target is: its beginning, that reversed, or what follows.
_INSTRUCTIONS = (1, 2, 3)


@dataclass(frozen=True)
class TaskLengths:
    """Tells the lengths of an iteration's samples; planners are given it.

    Attributes:
        longest: [A] tokens of a source and a target, or of a sequence where they are joined; what is longer is cut.
        tokens: of a mini-batch, without padding.
        scale: of all lengths.
        seed: of what is drawn.
    """

    longest: tuple[int, ...]
    tokens: int
    scale: float = 1.0
    seed: int = 0

    def __call__(self, iteration: int) -> NDArray[np.int64]:
        """Return [N, A] tokens of the samples of an iteration."""
        return self._drawn(np.random.default_rng([0, self.seed, iteration]))

    def held_out(self, batch: int) -> NDArray[np.int64]:
        """Return [N, A] tokens of held-out samples, the same whatever the seed."""
        return self._drawn(np.random.default_rng([1, 0, batch]))

    def _drawn(self, random: np.random.Generator) -> NDArray[np.int64]:
        most, target = (max(round(self.longest[place] / self.scale), 1) for place in (0, -1))
        num_tokens = max(round(self.tokens / self.scale), 1)
        pairs = mini_batch_of_pairs(num_tokens, most, random, joined=len(self.longest) == 1, max_target=target)
        scaled = np.maximum(np.rint(pairs * self.scale), 1).astype(np.int64)
        return np.minimum(scaled, self.longest)


class TaskSamples:
    """Makes the samples of an iteration, as long as they were drawn to be.

    Args:
        files: of which either kind has at least as many bytes as the longest sample.
        lengths: of the samples.
    """

    def __init__(self, files: Files, lengths: TaskLengths) -> None:
        self.lengths = lengths
        self._texts = [np.frombuffer(b"\n".join(part), dtype=np.uint8) for part in (files.training, files.held_out)]

    def training(self, iteration: int) -> list[Any]:
        """Return [N] samples: rows [length + 1] of a decoder-only model, or (source, target)."""
        return self._made(0, self.lengths.seed, iteration, self.lengths(iteration))

    def held_out(self, batch: int) -> list[Any]:
        """As :meth:`training`, of held-out text."""
        return self._made(1, 0, batch, self.lengths.held_out(batch))

    def _made(self, kind: int, seed: int, number: int, lengths_NA: NDArray[np.int64]) -> list[Any]:
        random, text = np.random.default_rng([kind, seed, number, 1]), self._texts[kind]
        samples: list[Any] = []
        for lengths in lengths_NA.tolist():
            begin = int(random.integers(len(text) - sum(lengths) - 2))
            if len(lengths) == 1:
                samples.append(torch.from_numpy(text[begin : begin + lengths[0] + 1].astype(np.int64)))
                continue
            source_length, target_length = lengths
            instruction = _INSTRUCTIONS[int(random.integers(len(_INSTRUCTIONS)))]
            run = text[begin : begin + source_length + target_length].astype(np.int64)
            if instruction == _INSTRUCTIONS[2] or target_length >= source_length:
                instruction, target = _INSTRUCTIONS[2], run[source_length:]
            else:
                target = run[1 : target_length + 1]
                target = target[::-1] if instruction == _INSTRUCTIONS[1] else target
            source = run[:source_length].copy()
            source[0] = instruction
            samples.append((torch.from_numpy(source), torch.from_numpy(target.copy())))
        return samples


def padding_efficiency(microbatches: Sequence[MicroBatch], lengths_NA: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return [A] tokens of the samples as a share of those that are computed (DynaPipe, section 2.2)."""
    sizes, lengths_KA = shapes_of(microbatches)
    samples = np.concatenate([each.samples for each in microbatches])
    shares: NDArray[np.float64] = lengths_NA[samples].sum(axis=0) / (sizes[:, None] * lengths_KA).sum(axis=0)
    return shares
