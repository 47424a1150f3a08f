"""The six models whose layers' work changes are as the paper describes them."""

import numpy as np
import pytest

from scripts.simulated.changing_layers import (
    CASES,
    SPARSITIES,
    depths,
    experts,
    frozen,
    pruned,
)
from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.division import PipelineLoad, balanced_partition

STEPS, LAYERS = 2000, 48


def work_of(layers):
    """[N, L] with a forward of a third and a backward of two."""
    return (layers.forward + 2.0 * layers.backward) / 3.0


def idle(work_L, boundaries):
    sums = np.add.reduceat(work_L, boundaries[:-1])
    return 1.0 - sums.mean() / sums.max()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("num_steps", "num_layers"), [(96, 24), (2000, 48)])
def test_layers_begin_dense_and_never_work_more(case, num_steps, num_layers):
    layers = CASES[case](num_steps, num_layers)
    assert layers.forward.shape == layers.backward.shape == (num_steps, num_layers)
    assert (layers.forward >= 0.0).all() and (layers.backward >= 0.0).all()
    if layers.changes:
        assert (layers.forward[0] == 1.0).all() and (layers.backward[0] == 1.0).all()
        assert layers.forward.max() <= 1.0 and layers.backward.max() <= 1.0


@pytest.mark.parametrize("case", ["pruning", "freezing", "early exit"])
def test_work_changes_where_a_program_would_say_so_and_nowhere_else(case):
    layers = CASES[case](STEPS, LAYERS)
    both = np.concatenate((layers.forward, layers.backward), axis=1)
    assert set(np.flatnonzero((np.diff(both, axis=0) != 0.0).any(axis=1)).tolist()) == layers.changes


def test_pruning_leaves_what_the_paper_says_over_all_layers():
    layers = pruned(STEPS, LAYERS)
    for iteration, sparsity in SPARSITIES.items():
        assert layers.forward[iteration // 5 + 1].mean() == pytest.approx(1.0 - sparsity, abs=1e-6)
    assert layers.forward[799].mean() == 1.0
    left = layers.forward[-1]
    assert left.max() / left.min() > 5.0
    assert np.ptp(pruned(STEPS, LAYERS, spread=0.0).forward[-1]) == pytest.approx(0.0)


def test_a_static_pipeline_of_frozen_layers_idles_for_as_long_as_the_paper_says():
    layers = frozen(STEPS, LAYERS)
    assert idle(work_of(layers)[-1], Partition.uniform(LAYERS, 16).boundaries) == pytest.approx(0.4, abs=0.02)
    assert (layers.forward == 1.0).all()
    frozen_L = layers.backward[-1] == 0.0
    assert frozen_L[: frozen_L.sum()].all()  # the front


@pytest.mark.parametrize(
    ("case", "static", "best"), [(experts, 0.25, 0.14), (depths, 0.18, 0.16)], ids=["experts", "depths"]
)
def test_routing_leaves_stages_as_idle_as_the_paper_says(case, static, best):
    """On average over eight models; the best division of each step is exact."""
    idles = []
    for seed in range(8):
        for work in case(20, LAYERS, seed=seed).forward[::4]:
            divided = balanced_partition(PipelineLoad.of(work, 16))
            idles.append((idle(work, Partition.uniform(LAYERS, 16).boundaries), idle(work, divided.boundaries)))
    assert np.mean(idles, axis=0).tolist() == pytest.approx([static, best], abs=0.015)
