"""Lengths of the samples of many tasks, like those of FLANv2 (DynaPipe, Fig. 1): most are short, some very long.

The paper tells the mean source of two tasks, 978 tokens of CNN/DailyMail and 52 of MNLI, that more than 80 % of a
naively padded mini-batch is padding, and that cutting at 8,192 instead of 512 tokens leaves 13.2 % more tokens. It
draws no distribution that could be read off. Here each sample is of one of several kinds of tasks, whose lengths are
log-normal; shares, medians and spreads are chosen so that all four come out (``tests/simulate/test_task_lengths.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TaskKind(NamedTuple):
    """Describe tasks whose samples are alike in length.

    Attributes:
        share: of the samples.
        source, target: the median tokens.
        spread: standard deviation of the logarithm of either.
    """

    share: float
    source: float
    target: float
    spread: float


#: Entailment and acceptability, question answering, translation, reading comprehension, dialogues, summaries,
#: documents.
FLAN_LIKE = (
    TaskKind(0.3532, 46.0, 3.0, 0.5),
    TaskKind(0.22, 90.0, 12.0, 0.7),
    TaskKind(0.16, 60.0, 50.0, 0.7),
    TaskKind(0.17, 210.0, 10.0, 0.5),
    TaskKind(0.07, 300.0, 40.0, 0.5),
    TaskKind(0.026, 880.0, 60.0, 0.45),
    TaskKind(0.0008, 2500.0, 150.0, 0.9),
)


def draw_pairs(num_samples: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Draw [N, 2] tokens of source and target."""
    table = np.array(FLAN_LIKE)
    chosen = table[random.choice(len(table), size=num_samples, p=table[:, 0] / table[:, 0].sum())]
    lengths = chosen[:, 1:3] * np.exp(chosen[:, 3:] * random.standard_normal((num_samples, 2)))
    return np.maximum(np.rint(lengths), 1).astype(np.int64)


def mini_batch_of_pairs(
    num_tokens: int, max_length: int, random: np.random.Generator, *, joined: bool, max_target: int | None = None
) -> NDArray[np.int64]:
    """Draw samples until they have so many tokens, what is longer cut off.

    Args:
        num_tokens: of sources and targets together, without padding.
        max_length: of a source, or of source and target where they are joined.
        joined: whether a sample is one sequence, as for a decoder-only model: [N, 1]; else [N, 2].
        max_target: of a target; None for ``max_length``.
    """
    drawn = draw_pairs(max(num_tokens // 40, 16), random)
    limits = max_length if joined else np.array([max_length, max_target or max_length])
    lengths: NDArray[np.int64] = np.minimum(drawn.sum(axis=1, keepdims=True) if joined else drawn, limits)
    totals = np.cumsum(lengths.sum(axis=1))
    while totals[-1] < num_tokens:
        more = mini_batch_of_pairs(
            num_tokens - int(totals[-1]), max_length, random, joined=joined, max_target=max_target
        )
        lengths = np.concatenate([lengths, more])
        totals = np.cumsum(lengths.sum(axis=1))
    return lengths[: int(np.searchsorted(totals, num_tokens)) + 1]
