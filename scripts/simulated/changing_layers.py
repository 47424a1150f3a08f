"""The six models of DynMo whose layers' work changes, as numbers: how much each layer works in each step.

``N`` steps, ``L`` layers, all alike while dense. The paper says when work changes and how much of it is left; how
unevenly layers share what is left it does not say. So each case has a spread, chosen here, by which layers differ:
the defaults of these functions. What the paper says of iteration i of its 10,000 holds for step i N / 10,000.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from zeroresize.policy.pipeline.division import Floats

#: Of the paper's runs.
_ITERATIONS = 10_000
#: Sparsity of all layers together after each pruning (DynMo, 5.1; supplement, Eq. (2) with four prunings), and when.
SPARSITIES = {4000: 0.52, 5000: 0.79, 6000: 0.89, 7000: 0.90}


@dataclass(frozen=True, eq=False)
class ChangingLayers:
    """Hold the work of layers in each step, as shares of a dense layer's.

    Attributes:
        forward, backward: [N, L].
        changes: steps, from 0, behind which a program would tell that the work of its layers has changed.
    """

    forward: Floats
    backward: Floats
    changes: frozenset[int]


def dense(num_steps: int, num_layers: int) -> ChangingLayers:
    """Return layers that never change."""
    return _same(np.ones((num_steps, num_layers)))


def pruned(num_steps: int, num_layers: int, *, spread: float = 0.3, seed: int = 0) -> ChangingLayers:
    """Return layers that are pruned four times by the magnitude of weights, over all layers at once.

    A layer's work is its share of weights that are left, as the paper counts it. Weights are normal, and layers differ
    in their standard deviation: log-normally by ``spread``. So what is left differs from layer to layer by more the
    more is pruned. Without a spread all layers lose alike.
    """
    scales = np.exp(spread * _smooth(num_layers, seed))
    left, changes = np.ones((num_steps, num_layers)), set()
    for iteration, sparsity in SPARSITIES.items():
        begin = _step_of(iteration, num_steps)
        left[begin:] = _left(scales, 1.0 - sparsity)
        changes.add(begin - 1)
    return ChangingLayers(left, left, frozenset(changes))


def _left(scales: Floats, share: float) -> Floats:
    """[L] shares of weights beyond one threshold in all layers, of whose mean is ``share``."""
    low, high = 0.0, 20.0 * float(scales.max())
    for _ in range(60):
        threshold = (low + high) / 2
        low, high = (threshold, high) if _beyond(threshold, scales).mean() > share else (low, threshold)
    return _beyond(high, scales)


def _beyond(threshold: float, scales: Floats) -> Floats:
    return np.array([math.erfc(threshold / (math.sqrt(2.0) * scale)) for scale in scales.tolist()])


def frozen(num_steps: int, num_layers: int, *, share: float = 0.6, num_times: int = 8) -> ChangingLayers:
    """Return layers of which the first are frozen, a few more at a time, until ``share`` of them are.

    Early layers converge first (DynMo, 2.3). What is frozen at the front of a model has no backward, and backward is
    two thirds of a layer's work. So with 60 % of layers frozen, stages with equally many layers idle for 40 % of their
    time on average, as the paper reports of Egeria and AutoFreeze (Fig. 1). That is from iteration 1,000 to 8,000.
    """
    backward, changes = np.ones((num_steps, num_layers)), set()
    for number, iteration in enumerate(np.linspace(1000, 8000, num_times), start=1):
        begin = _step_of(iteration, num_steps)
        backward[begin:, : round(share * num_layers * number / num_times)] = 0.0
        changes.add(begin - 1)
    return ChangingLayers(np.ones_like(backward), backward, frozenset(changes))


def exiting(
    num_steps: int, num_layers: int, *, first: float = 0.25, left: float = 0.05, num_times: int = 10
) -> ChangingLayers:
    """Return layers that tokens leave: all go through the first quarter, ever fewer through later ones.

    At the end ``left`` of the tokens come to the last layer, and layers work on 39 % of them on average. The threshold
    of confidence falls from iteration 1,000 to 7,000, ``num_times`` times, each a change.
    """
    depth = np.clip((np.arange(num_layers) / max(num_layers - 1, 1) - first) / (1.0 - first), 0.0, 1.0)
    at_end = np.exp(np.log(left) * np.sqrt(depth))  # many leave early (CALM)
    work, changes = np.ones((num_steps, num_layers)), set()
    for number, iteration in enumerate(np.linspace(1000, 7000, num_times), start=1):
        begin = _step_of(iteration, num_steps)
        work[begin:] = 1.0 + (at_end - 1.0) * number / num_times
        changes.add(begin - 1)
    return ChangingLayers(work, work, frozenset(changes))


def sparse_attention(
    num_steps: int,
    num_layers: int,
    *,
    attention: float = 0.75,
    spread: float = 0.6,
    jitter: float = 0.15,
    drift: float = 0.5,
    seed: int = 0,
) -> ChangingLayers:
    """Return layers whose attention computes the blocks that hash codes leave, others in every step.

    Args:
        attention: share of a dense layer's work, as with contexts of about 16,000 tokens.
        spread: of the logarithm of what is left, from layer to layer; a tenth of blocks is left in the middle.
        jitter: of the logarithm, from step to step, in each layer by itself.
        drift: share of the spread that is another one at the end than at the start.
    """
    random = np.random.default_rng(seed)
    first, last = _smooth(num_layers, seed), _smooth(num_layers, seed + 1)
    place = np.linspace(0.0, 1.0, num_steps)[:, None]
    slow = first + drift * place * (last - first)
    left = np.minimum(0.1 * np.exp(spread * slow + jitter * random.standard_normal((num_steps, num_layers))), 1.0)
    return _same(1.0 - attention + attention * left)


def experts(
    num_steps: int, num_layers: int, *, spread: float = 0.3, jitter: float = 0.06, seed: int = 0
) -> ChangingLayers:
    """Return layers of experts of which the most wanted one sets the pace, in some layers a more wanted one.

    Spread and jitter, of the logarithm, are such that a static pipeline of 48 layers on 16 stages idles for 25 % of its
    time for that reason (DynMo, 5.1). The paper's 8 % after balancing no division of whole layers reaches with them:
    the best of each step leaves 14 % idle, since three layers a stage are too coarse.
    """
    random = np.random.default_rng(seed)
    layers, steps = random.standard_normal(num_layers), random.standard_normal((num_steps, num_layers))
    return _same(np.exp(spread * layers + jitter * steps))


def depths(
    num_steps: int, num_layers: int, *, left: float = 0.5, spread: float = 0.12, jitter: float = 0.06, seed: int = 0
) -> ChangingLayers:
    """Return layers of which every other one lets most tokens pass by, in some more than in others.

    Spread and jitter are such that a static pipeline of 48 layers on 16 stages idles for 18 % of its time for that
    reason (DynMo, 5.1). The paper's 4 % after balancing no division of whole layers reaches with them: the best of each
    step leaves 16 % idle, since three layers a stage are too coarse.
    """
    random = np.random.default_rng(seed)
    layers, steps = random.standard_normal(num_layers), random.standard_normal((num_steps, num_layers))
    work = np.exp(spread * layers + jitter * steps)
    work[:, 1::2] *= left
    return _same(work)


#: By the names that the benchmarks use.
CASES: dict[str, Callable[[int, int], ChangingLayers]] = {
    "pruning": pruned,
    "freezing": frozen,
    "early exit": exiting,
    "sparse attention": sparse_attention,
    "mixture of experts": experts,
    "mixture of depths": depths,
}


def _same(work: Floats) -> ChangingLayers:
    return ChangingLayers(work, work, frozenset())


def _step_of(iteration: float, num_steps: int) -> int:
    return round(iteration * num_steps / _ITERATIONS)


def _smooth(num_layers: int, seed: int) -> Floats:
    """[L] standard normal numbers of which neighbours are alike, as layers of like depth are."""
    random = np.random.default_rng(seed)
    raw = random.standard_normal(num_layers + 4)
    values: Floats = np.convolve(raw, np.ones(5), mode="valid")
    return (values - values.mean()) / values.std()
