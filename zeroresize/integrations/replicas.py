"""What hosts have for data parallelism beside a model: reducers of gradients, and optimizers that replicas divide.

Both are made for the shapes that weights have, and made anew where units move.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import whole_of_parts

#: The key of what an optimizer steps in place of a weight.
_MASTER = "param"


class Reducer:
    """Averages gradients over replicas, in buffers made for the shapes that parameters have.

    Attributes:
        process_group: over which it averages.
    """

    process_group: ProcessGroup

    def averaged(self) -> Iterable[Tensor]:
        """Yield the parameters whose gradients it averages."""
        raise NotImplementedError

    def why_not_rebuilt(self) -> str | None:
        """Return why it cannot be made anew; None if it can."""

    def beside(self) -> Iterable[Tensor]:
        """Yield the tensors that it has put beside parameters as their attributes, and makes anew."""
        return ()

    def note_step(self) -> None:
        """Note that a step has used what gradients its buffers hold."""

    def bytes_to_rebuild(self, num_more: int) -> int:
        """Return the bytes that it takes beside what it has, where this rank gets so many elements more."""
        return 0

    def drop(self) -> None:
        """Let go of what is made for the present shapes; no collective."""

    def rebuild(self) -> None:
        """Make it anew for the shapes that parameters have now; no collective."""


class ShardedOptimizer(ABC):
    """Takes a host's optimizer apart and puts it together for weights of other shapes, alike on all replicas.

    Attributes:
        inner: the optimizer of torch that steps this rank's parts.
        weights: that it steps, on whatever rank, with the numbers of their groups as far as these are known; in an
            order that is the same on all replicas.
        replicas: the ranks that divide it; None where that is not known.
        steps_empty: whether a rank may have no elements of a weight.
    """

    inner: Any
    weights: Mapping[Tensor, int | None]
    replicas: Any
    steps_empty = True

    @abstractmethod
    def why_not(self) -> str | None:
        """Return why units cannot move with it, by what is set or held; None if they can."""

    @abstractmethod
    def part_of(self, weight: Tensor) -> tuple[Tensor, slice, slice]:
        """Return a vector that this rank steps, which of its elements are a weight's, and which of the weight's.

        Where none are, any that is stepped, or one without elements.
        """

    @abstractmethod
    def rebuild(self) -> None:
        """Make parts anew for the shapes that weights have now, without state; no collective."""

    def has_master(self, weight: Tensor) -> bool:
        """Return whether parts of a weight are copies, and not views of what is up to date on all replicas."""
        return True

    def bytes_of_element(self, weight: Tensor) -> int:
        """Return the bytes, at most, of what :meth:`gather` makes for an element; none for one of a frozen weight."""
        vectors = self.kept_of(weight)[0] if weight in self.weights else {}
        return sum(max(vector.itemsize, torch.float32.itemsize) for vector in vectors.values())

    def kept_of(self, weight: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return by key, in one order, vectors like this rank's part of a weight, and all else that is kept of it."""
        part, *_ = self.part_of(weight)
        state = self.inner.state.get(part, {})
        vectors = {key: value for key, value in sorted(state.items()) if _is_of_elements(key, value, part)}
        others = {key: value for key, value in state.items() if key not in vectors}
        return {_MASTER: part.detach(), **vectors} if self.has_master(weight) else vectors, others

    def describe(self) -> Any:
        """Return what all ranks must agree on before they gather, as values for JSON; no collective.

        Raises:
            ValueError: for what cannot be gathered.
        """
        described = []
        for weight in self.weights:
            vectors, others = self.kept_of(weight)
            plain = [(key, each.tolist() if isinstance(each, Tensor) else each) for key, each in sorted(others.items())]
            described.append([str(plain), *((key, str(vector.dtype)) for key, vector in vectors.items())])
        return described

    def gather(self, weight: Tensor, scratch: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return what is stepped for a weight, and its state by key; collective over replicas, for each in its order.

        The first is the weight itself, up to date on all replicas, or a master copy of its shape. State of its shape is
        whole; anything else is of the whole weight, such as the number of steps. There is none before the first step.
        Nothing changes but weights that were not up to date; what is returned may lie on the CPU.

        Args:
            scratch: bytes on the device of the largest weight's size in float32, or its dtype, to gather in: a rank
                that ran out of memory between collectives would leave others waiting.
        """
        _, at, place = self.part_of(weight)
        vectors, state = self.kept_of(weight)
        for key, vector in vectors.items():
            state[key] = whole_of_parts(vector[at], place, weight, self.replicas, scratch)
        return state.pop(_MASTER, weight), state

    def put(self, weight: Tensor, stepped: Tensor, state: Mapping[str, Any]) -> None:
        """Take this rank's part of what is stepped for a weight, and of its state; no collective."""
        part, at, place = self.part_of(weight)
        part.detach()[at].copy_(stepped.detach().flatten()[place])
        for key, value in state.items() if part.numel() else ():
            kept = self.inner.state[part]
            if not _is_of_elements(key, value, weight):
                kept[key] = value.clone() if isinstance(value, Tensor) else value
                continue
            if key not in kept:
                kept[key] = torch.zeros_like(part.detach(), dtype=value.dtype)
            kept[key][at].copy_(value.flatten()[place])


def _is_of_elements(key: str, value: Any, tensor: Tensor) -> bool:
    """Whether what is kept of a tensor is by element; a number of steps never is."""
    return isinstance(value, Tensor) and value.shape == tensor.shape and key != "step"


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
