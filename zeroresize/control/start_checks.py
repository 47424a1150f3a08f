"""Ranks that hold different copies of a weight train different models, and nothing fails: so copies are compared, at
the start and now and then.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.checks.replicated import (
    distance_of_sums,
    key_of_parameter,
    replicated_parameters,
    sums_of_parameters,
)
from zeroresize.comm.collectives import group_rank
from zeroresize.comm.exchange import Exchange
from zeroresize.control.setup_checks import HINT, MOST_NAMED, Layers, check_data_parallelism
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.utils.alike import minority, named_ranks

logger = logging.getLogger(__name__)

#: Of its norm: what two ranks' copies of a parameter may differ by in sum. Rounding in another order, as atomic
#: additions on a GPU do it, stays below over a long training; other seeds, or another checkpoint, are far above.
_TOLERANCE = 1e-3
#: Of its norm, times the machine epsilon and the root of the steps: what rounding adds to that at most, as it adds up
#: like a random walk. A gradient that is scaled by other factors on other ranks is above after a few steps.
_ROUNDINGS = 8.0
#: Copies are compared whenever the number of steps has doubled, and after so many at the latest.
_MOST_STEPS = 1000
#: Of one rank's parameter the sums of its even and of its odd elements, and its norm; None where it has none such.
_Sums = Sequence[float] | None


class StartCheck:
    """Compares what the ranks of a group should hold alike: in the first training forward, until which a model may be
    loaded, and at updates, with which copies of a parameter may have drifted apart.

    Compared are the parameters that are no shards, by a few sums of each. Left out is what may be a shard: parameters
    of modules that hold a process group, those that a framework has marked (``dist_layout``,
    ``tensor_model_parallel``), and those whose shapes differ between the ranks.

    Args:
        model: what is trained.
        layers: its balanced layers by name.
        process_group: their tensor-parallel group.
        exchange: with its ranks.
    """

    def __init__(self, model: nn.Module, layers: Layers, process_group: ProcessGroup, exchange: Exchange) -> None:
        self._model, self._layers, self._group, self._exchange = model, layers, process_group, exchange
        self._at_start: dict[str, list[float]] | None = None
        self._next_step, self._has_warned = 0, False
        first = next(iter(layers.values()))
        first.watch_start = _calling(weakref.WeakMethod(self._training_begins))
        self.close = weakref.finalize(self, _watch_no_start, first)
        self.close.atexit = False

    def _training_begins(self) -> None:
        if not self.close.alive:
            return
        self.close()
        check_data_parallelism(self._model, self._layers, self._group)
        self.compare()

    def compare(self) -> None:
        """Compare the ranks' parameters now; collective.

        Raises:
            ValueError: on every rank, naming the first parameters that differ and the ranks on which they do.
        """
        replicated, sums = self._gathered()
        self._at_start = _distances(sums)
        differing = {
            name: _description(sums[name], _TOLERANCE)
            for name, of_ranks in self._at_start.items()
            if _above(of_ranks, _TOLERANCE)
        }
        if differing:
            raise ValueError(
                f"{len(differing)} of {len(replicated)} parameters that all ranks of the group should hold alike "
                f"differ between the ranks: {_named(differing)}. Seed the "
                "ranks alike before the model is built, or load the same checkpoint on all. A shard of a layer of "
                f"your own is left out where its parameter has tensor_model_parallel=True; {HINT}"
            )

    def after_update(self, num_steps: int) -> None:
        """Warn, once and on rank 0, of copies that have drifted apart since the start; collective, if it is due.

        Args:
            num_steps: of the optimizer so far, the same on all ranks.
        """
        if self._at_start is None or num_steps < self._next_step:
            return
        self._next_step = min(2 * num_steps, num_steps + _MOST_STEPS)
        replicated, sums = self._gathered()
        drifted = {}
        for name, of_ranks in _distances(sums).items():
            before = self._at_start.get(name, [0.0] * len(of_ranks))
            rounding = _ROUNDINGS * torch.finfo(replicated[name].dtype).eps * math.sqrt(num_steps)
            more = [now - then for now, then in zip(of_ranks, before, strict=True)]
            most = min(rounding, _TOLERANCE)
            if _above(more, most):
                drifted[name] = _description(sums[name], most)
        if drifted and not self._has_warned and group_rank(self._group) == 0:
            self._has_warned = True
            logger.warning(
                "step %d: %d of %d parameters that all ranks of the group hold alike have drifted apart, so the ranks "
                "train different models: %s. Give every rank of the group the same batches (samplers divide them over "
                "data-parallel ranks only), clip gradients by zeroresize.clip_grad_norm_ (torch's takes a rank's own "
                "shards), step on all ranks or on none where a gradient scaler skips steps, and draw alike what is "
                "random outside of the parallel layers; %s",
                num_steps,
                len(drifted),
                len(replicated),
                _named(drifted),
                HINT,
            )

    def _gathered(self) -> tuple[dict[str, Tensor], dict[str, list[_Sums]]]:
        """Return the parameters that should be alike, and every rank's sums of those that rank 0 has; collective."""
        replicated = dict(replicated_parameters(self._model, self._group))
        numbers_of_rank = [number for row in sums_of_parameters(replicated) for number in row]
        tables = [
            {numbers[at]: numbers[at + 1 : at + 4] for at in range(0, len(numbers), 4)}
            for numbers in self._exchange.gather(numbers_of_rank)
        ]
        keys = {name: key_of_parameter(name, parameter) for name, parameter in replicated.items()}
        return replicated, {
            name: [table.get(key) for table in tables] for name, key in keys.items() if key in tables[0]
        }


def _distances(sums: Mapping[str, Sequence[_Sums]]) -> dict[str, list[float]]:
    """Return by how much each rank's parameters differ from rank 0's, by name."""
    return {
        name: [distance_of_sums(of_rank, of_ranks[0]) for of_rank in of_ranks]
        for name, of_ranks in sums.items()
        if of_ranks[0] is not None
    }


def _above(distances: Sequence[float], most: float) -> bool:
    return any(distance > most for distance in distances)


def _description(sums: Sequence[_Sums], most: float) -> str:
    """Tell which ranks hold a parameter alike: the few that differ from the many, or what each of them has."""
    groups: list[tuple[Sequence[float], list[int]]] = []
    for rank, of_rank in enumerate(sums):
        if of_rank is None:
            continue
        known = next((ranks for of_first, ranks in groups if distance_of_sums(of_rank, of_first) <= most), None)
        if known is None:
            groups.append((of_rank, [rank]))
        else:
            known.append(rank)
    few = minority([ranks for _, ranks in groups])
    if few:
        return f"on {named_ranks(few)}, other than on most ranks"
    digests = [f"{named_ranks(ranks)}: {_digits(of_first)}" for of_first, ranks in groups[:MOST_NAMED]]
    return f"({', '.join(digests)}{', …' if groups[MOST_NAMED:] else ''})"


def _digits(sums: Sequence[float]) -> str:
    even, odd, norm = sums
    return f"sum {even + odd:.8g} and norm {norm:.8g}"


def _named(differing: Mapping[str, str]) -> str:
    differences = [f"{name} {description}" for name, description in list(differing.items())[:MOST_NAMED]]
    return f"{'; '.join(differences)}{'; …' if len(differing) > MOST_NAMED else ''}"


def _calling(method: weakref.WeakMethod[Any]) -> Any:
    def call() -> None:
        alive = method()
        if alive is not None:
            alive()

    return call


def _watch_no_start(layer: BalancedLinear) -> None:
    layer.watch_start = None
