"""How much work layers do, counted in every block, so that a profile of one block tells of all since the last.

Where routing changes a layer's work from step to step, one measured block tells of that step's luck. Counting costs
next to nothing: a count has no unit, must be proportional to the layer's seconds, and waits for no device. A profile's
seconds are those of the measured block × the mean count of the blocks since the last profile / the count of this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import finalize

from torch import Tensor, nn

from zeroresize.pipeline.pipeline import Pipeline

#: How much a layer did in the block that is over, in any unit; or "tokens" for :class:`GivenRows`.
CountWork = Callable[[nn.Module], float] | Literal["tokens"]

#: A mean of fewer blocks takes in those before the last profile.
_LEAST_BLOCKS = 8


@dataclass
class _Counts:
    """Of one layer since it is here: the last block, and sums since the last profile and of the time before."""

    now: float = 0.0
    total: float = 0.0
    num_blocks: int = 0
    total_before: float = 0.0
    num_blocks_before: int = 0

    def add(self, count: float) -> None:
        self.now = count
        self.total += count
        self.num_blocks += 1

    @property
    def mean(self) -> float:
        if self.num_blocks >= _LEAST_BLOCKS:
            return self.total / self.num_blocks
        return (self.total + self.total_before) / max(self.num_blocks + self.num_blocks_before, 1)

    def begin_anew(self) -> None:
        if self.num_blocks >= _LEAST_BLOCKS:
            self.total_before, self.num_blocks_before = self.total, self.num_blocks
            self.total, self.num_blocks = 0.0, 0


@dataclass(frozen=True)
class CountedBlock:
    """Scale the seconds of a measured block to its layers' mean work.

    Attributes:
        counts: in the block and on average, by layer.
        error: why something could not be counted; None where all was.
    """

    counts: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    error: Exception | None = None
    _seconds_per_count: dict[int, tuple[float, float]] = field(default_factory=dict)

    def mean_seconds(self, number: int, forward_s: float, backward_s: float) -> tuple[float, float]:
        """Return the seconds that a layer takes on average, by those that it has taken in this block.

        A layer that had nothing to do in this block takes what it took for as much work in the last one in which it
        had some.
        """
        now, mean = self.counts.get(number, (0.0, 0.0))
        if now > 0.0:
            self._seconds_per_count[number] = forward_s / now, backward_s / now
            return forward_s * (mean / now), backward_s * (mean / now)
        forward_s_per_count, backward_s_per_count = self._seconds_per_count.get(number, (0.0, 0.0))
        if mean == 0.0 or forward_s_per_count + backward_s_per_count == 0.0:
            return forward_s, backward_s
        return forward_s_per_count * mean, backward_s_per_count * mean


class WorkCounter:
    """Counts what the layers of this rank do, block by block.

    Args:
        pipeline: whose layers are counted; those that arrive, too, from their first whole block on.
        count_work: as of :class:`~zeroresize.pipeline.PipelineBalancer`; None where nothing is counted.

    Raises:
        ValueError: for anything else.
    """

    def __init__(self, pipeline: Pipeline, count_work: CountWork | None) -> None:
        self._pipeline = pipeline
        self._rows: GivenRows | None = None
        self._count: Callable[[nn.Module], float] | None = None
        if count_work == "tokens":
            self._count = self._rows = GivenRows(pipeline.layers)
        elif count_work is None or callable(count_work):
            self._count = count_work
        else:
            raise ValueError(f"count_work={count_work!r} is not allowed: a function, 'tokens' or None is needed")
        self._counts: dict[int, _Counts] = {}
        self._seconds_per_count: dict[int, tuple[float, float]] = {}
        self._begun_with: range = range(0)
        self._error: Exception | None = None

    def begin_block(self) -> None:
        """Begin a block with the layers that are here now."""
        if self._count is None:
            return
        self._begun_with = self._pipeline.present
        if self._rows is not None:
            self._rows.reset()

    def end_block(self) -> None:
        """Count what the layers of this block have done; an error of counting is kept for :meth:`measured_block`."""
        if self._count is None:
            return
        for number in self._begun_with:
            count = self._checked_count(number)
            self._counts.setdefault(number, _Counts()).add(count)
        for here in (self._counts, self._seconds_per_count):
            for number in [one for one in here if one not in self._pipeline.present]:
                del here[number]

    def measured_block(self) -> CountedBlock:
        """Return the counts of the block that has just ended, which was measured."""
        counts = {number: (of_layer.now, of_layer.mean) for number, of_layer in self._counts.items()}
        for of_layer in self._counts.values():
            of_layer.begin_anew()
        return CountedBlock(counts, self._error, self._seconds_per_count)

    def forget(self) -> None:
        """Forget all counts, as layers have other work from now on."""
        self._counts.clear()
        self._seconds_per_count = {}  # not cleared: a block that is still to be read has the old one

    def _checked_count(self, number: int) -> float:
        assert self._count is not None
        try:
            count = float(self._count(self._pipeline.layers[number]))
            if not 0.0 <= count < math.inf:
                raise ValueError(f"count_work returned {count} for layer {number}: a number of at least 0 is needed")
        except Exception as error:  # whatever the user's function raises: other ranks must hear of it
            self._error = self._error or error
            return 0.0
        return count


class GivenRows:
    """Counts the rows that each module with a matrix is given, times the elements of its matrices.

    A row is a vector of the last dimension of the first floating-point tensor, such as a token's hidden state: what is
    looked up by index, as in embeddings, does not count. Only shapes are read, so of experts that are one parameter of
    three dimensions the rows are counted that all of them are given, not those of the busiest one.

    Args:
        layers: all of them; hooks stay on their modules until this object is gone.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._rows: dict[nn.Module, list[float]] = {}
        self._modules: dict[nn.Module, list[nn.Module]] = {}
        handles = []
        for layer in layers:
            self._modules[layer] = [one for one in layer.modules() if _matrices(one)]
            for module in self._modules[layer]:
                if module not in self._rows:
                    self._rows[module] = [0.0]
                    handles.append(module.register_forward_pre_hook(_Adding(self._rows[module]), with_kwargs=True))
        finalize(self, _remove, handles)

    def reset(self) -> None:
        """Begin to count anew."""
        for rows in self._rows.values():
            rows[0] = 0.0

    def __call__(self, layer: nn.Module) -> float:
        """Return what a layer was given since :meth:`reset`."""
        modules = self._modules.get(layer, ())
        return math.fsum(self._rows[one][0] * sum(map(Tensor.numel, _matrices(one))) for one in modules)


class _Adding:
    """A hook that adds to ``rows[0]``."""

    def __init__(self, rows: list[float]) -> None:
        self._rows = rows

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for value in args or kwargs.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                shape = value.shape
                self._rows[0] += value.numel() / shape[-1] if shape and shape[-1] else 0.0
                return


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    return [one for one in module.parameters(recurse=False) if one.dim() > 1]


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
