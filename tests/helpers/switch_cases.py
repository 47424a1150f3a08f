"""Strategies and tensors to draw for plans of switches, and the least volumes that any plan has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from zeroresize.plan.layout import Layout, TensorSpec, UnitDivision
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.switches.slices import Slices

DEGREES = [(a, b, c) for a in (1, 2, 3, 4) for b in (1, 2, 3, 4) for c in (1, 2) if a * b * c <= 8]


class SwitchCase(NamedTuple):
    before: Layout
    after: Layout
    tensors: list[TensorSpec]
    nodes: list[int]


@st.composite
def some_strategy(draw: st.DrawFn, num_ranks: int) -> Strategy:
    """On some of the ranks in any order, with any shares."""
    dp, tp, pp = draw(st.sampled_from([one for one in DEGREES if np.prod(one) <= num_ranks]))
    ranks = draw(st.permutations(range(num_ranks)))[: dp * tp * pp]
    shares = draw(st.lists(st.integers(0, 3), min_size=tp, max_size=tp).filter(any) | st.just([]))
    return Strategy(dp, tp, pp, tuple(ranks), tuple(shares))


@st.composite
def switch_cases(draw: st.DrawFn, most_ranks: int = 8) -> SwitchCase:
    """Two strategies of a small model, on nodes of any sizes."""
    num_ranks = draw(st.integers(1, most_ranks))
    num_layers = draw(st.integers(2, 3))
    divided = st.builds(lambda rows: UnitDivision(0, 12, rows), st.integers(1, 3))
    divisions = draw(st.lists(divided | st.none(), min_size=num_layers, max_size=5))
    tensors = [
        TensorSpec(f"tensor {number}", number % num_layers, (12 * own.rows, 2) if own else (5,), 4, own)
        for number, own in enumerate(divisions)
    ]
    layouts = [draw(some_strategy(num_ranks)).layout(tensors, num_ranks, num_layers) for _ in range(2)]
    nodes = draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
    return SwitchCase(*layouts, tensors, nodes)


def least_volumes(slices: Slices, nodes: Sequence[int]) -> tuple[int, int]:
    """The least bytes that the rank which sends most has to send, inside nodes and between nodes.

    Whatever a rank can get from its own node comes from there. Exact, by integer programming.
    """
    jobs: list[list[tuple[int, list[int]]]] = [[], []]  # of each link: bytes, and who may send
    for pattern, size in zip(slices.patterns, slices.num_bytes.tolist(), strict=True):
        holders = np.flatnonzero(slices.held[pattern]).tolist()
        for rank in np.flatnonzero(slices.wanted[pattern] & ~slices.held[pattern]):
            near = [holder for holder in holders if nodes[holder] == nodes[rank]]
            jobs[not near].append((size, near or holders))
    within, between = (_least_largest(own, len(nodes)) for own in jobs)
    return within, between


def _least_largest(jobs: list[tuple[int, list[int]]], num_ranks: int) -> int:
    if not jobs:
        return 0
    choices = [(job, rank) for job, (_, ranks) in enumerate(jobs) for rank in ranks]
    is_done = np.zeros((len(jobs), len(choices) + 1))
    volumes = np.zeros((num_ranks, len(choices) + 1))
    for column, (job, rank) in enumerate(choices):
        is_done[job, column] = 1.0
        volumes[rank, column] = jobs[job][0]
    volumes[:, -1] = -1.0  # the last variable is the largest volume
    objective: NDArray[np.float64] = np.append(np.zeros(len(choices)), 1.0)
    found = milp(
        objective,
        integrality=1.0 - objective,
        bounds=Bounds(0.0, np.append(np.ones(len(choices)), np.inf)),
        constraints=[LinearConstraint(is_done, 1.0, 1.0), LinearConstraint(volumes, -np.inf, 0.0)],
    )
    assert found.success, found.message
    return round(found.fun)
