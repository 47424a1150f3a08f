"""An optimizer of which data-parallel ranks step different parts is whole for as long as units move.

A host's optimizer takes part by a small class of :class:`ShardedOptimizer`, which is to be named in ``_CLASSES``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.exchange import Meet
from zeroresize.optim.optimizers import kinds_of, with_inner
from zeroresize.resharding.agreement import agreed, allocate_together, require_same
from zeroresize.utils.hashing import fingerprint

#: Of optimizers, by their package and name, where their class is.
_CLASSES: Mapping[tuple[str, str], tuple[str, str]] = {
    ("colossalai", "LowLevelZeroOptimizer"): ("zeroresize.integrations.colossalai_zero", "ShardedByColossalai"),
    ("deepspeed", "DeepSpeedZeroOptimizer"): ("zeroresize.integrations.deepspeed", "ShardedByDeepSpeed"),
    ("megatron", "DistributedOptimizer"): ("zeroresize.integrations.megatron_buffers", "ShardedByMegatron"),
}


class ShardedOptimizer(Protocol):
    """Takes a host's optimizer apart and puts it together for weights of other shapes, alike on all replicas.

    Attributes:
        weights: that it steps, on whatever rank; in an order that is the same on all replicas.
        averages_over: the replicas, where no wrapper of the model tells which these are; else None.
        steps_empty: whether a rank may have no elements of a weight.
    """

    weights: Sequence[Tensor]
    averages_over: ProcessGroup | None
    steps_empty: bool

    def why_not(self) -> str | None:
        """Return why units cannot move with it, by what is set or held; None if they can."""

    def bytes_of(self, weight: Tensor) -> int:
        """Return the bytes of all that :meth:`gather` makes for a weight."""

    def describe(self) -> Any:
        """Return what all ranks must agree on before they gather, as values for JSON; no collective.

        Raises:
            ValueError: for what cannot be gathered.
        """

    def gather(self, weight: Tensor, scratch: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return what is stepped for a weight, and its state by key; collective over replicas, for each in its order.

        The first is the weight itself, up to date on all replicas, or a master copy of its shape. State of its shape is
        whole; anything else is of the whole weight, such as the number of steps. There is none before the first step.
        Nothing changes but weights that were not up to date; what is returned may lie on the CPU.

        Args:
            scratch: bytes on the device of the largest weight's size in float32, or its dtype, to gather in: a rank
                that ran out of memory between collectives would leave others waiting.
        """

    def rebuild(self) -> None:
        """Make parts anew for the shapes that weights have now, without state; no collective."""

    def put(self, weight: Tensor, stepped: Tensor, state: Mapping[str, Any]) -> None:
        """Take this rank's part of what is stepped for a weight, and of its state; no collective."""


def sharded_optimizer(optimizer: Any) -> ShardedOptimizer | None:
    """Return what takes a sharded optimizer apart; None for one that is whole, or not known."""
    try:
        inner = with_inner(optimizer)
    except ValueError:  # several optimizers
        return None
    for each in inner:
        for kind in kinds_of(each):
            if kind in _CLASSES:
                module, name = _CLASSES[kind]
                made: ShardedOptimizer = getattr(importlib.import_module(module), name)(each)
                return made
    return None


class WholeOptimizer(torch.optim.Optimizer):
    """Holds whole what a sharded optimizer keeps in parts, to be moved and to be taken back; collective over replicas.

    It does not step.
    """

    def __init__(self, sharded: ShardedOptimizer, scratch: Tensor) -> None:
        self._sharded, self._masters = sharded, dict[int, Tensor]()
        gathered = {weight: sharded.gather(weight, scratch) for weight in sharded.weights}
        super().__init__([stepped for stepped, _ in gathered.values()], {})
        for weight, (stepped, state) in gathered.items():
            self._masters[id(weight)] = stepped
            if state:
                self.state[stepped].update(state)

    def get_working_to_master_map(self) -> Mapping[int, Tensor]:
        """Return what is stepped by the ``id`` of the weight, as Colossal-AI's optimizers do."""
        return self._masters

    def put_back(self) -> None:
        """Let the sharded optimizer go on with what is here now; no collective."""
        self._sharded.rebuild()
        for weight in self._sharded.weights:
            stepped = self._masters[id(weight)]
            self._sharded.put(weight, stepped, self.state.pop(stepped, {}))


def gathered(sharded: ShardedOptimizer, meet: Meet) -> WholeOptimizer:
    """Return the whole of a sharded optimizer, for which the memory of the hosts is enough; collective.

    Raises:
        ValueError, CannotMoveError, NotEnoughMemoryError, RuntimeError: as a move, on all ranks; nothing has changed.
    """

    def describe() -> float:
        if (why := sharded.why_not()) is not None:
            raise ValueError(f"units cannot move with this optimizer: {why}")
        return fingerprint(json.dumps(sharded.describe()))

    _, table = agreed(meet, describe, lambda number: (number, 0.0), what="what the optimizer keeps", moves=True)
    require_same([number for number, *_ in table], "what the optimizer keeps", meet, moves=True)
    needed = [sharded.bytes_of(weight) for weight in sharded.weights]
    largest, device = max(each.numel() * max(each.itemsize, 4) for each in sharded.weights), sharded.weights[0].device
    scratch, what = list[Tensor](), "the whole state of the optimizer"
    allocate_together(sum(needed), torch.device("cpu"), lambda: None, meet, what)
    allocate_together(
        largest, device, lambda: scratch.append(torch.empty(largest, dtype=torch.uint8, device=device)), meet, what
    )
    return agreed(meet, lambda: WholeOptimizer(sharded, *scratch), what=what, moves=True)[0]
