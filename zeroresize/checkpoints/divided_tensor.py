"""torch.distributed.checkpoint (DCP) writes and reads tensors of which every rank holds a part.

A rank's part is a number of pieces of one dimension, which lie one after another. Every piece becomes a chunk of the
whole tensor, so a file holds whole tensors, whoever wrote or reads which part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zeroresize.layers.local_parts import local_of
from zeroresize.plan.ownership import Indices
from zeroresize.utils.torch_private import is_copy_to, make_wrapper, no_torch_function


class Piece(NamedTuple):
    """Describes entries that are neighbours along one dimension, both in the whole tensor and on this rank.

    Attributes:
        begin: where they begin in the whole tensor.
        local_begin: where they begin on this rank.
        length: how many they are.
    """

    begin: int
    local_begin: int
    length: int


@dataclass(frozen=True)
class TensorDivision:
    """Describes how a tensor is divided over the ranks of a group.

    Attributes:
        dim: along which it is divided.
        whole_size: of that dimension, of all ranks together.
        pieces: what this rank holds at the time of the call.
        padding: how many entries this rank holds beyond the whole tensor; they are neither written nor read.
    """

    dim: int
    whole_size: int
    pieces: Callable[[], Sequence[Piece]]
    padding: int = 0


def unit_pieces(units: Indices, num_units: int, rows: Sequence[int]) -> list[Piece]:
    """Return the pieces of a rank that owns some units: runs of neighbours in every part, such as q, k and v.

    Args:
        units: that this rank owns, ascending.
        num_units: of all ranks together, in every part.
        rows: neighbours that one unit has, in each part.
    """
    runs = np.split(units, np.flatnonzero(np.diff(units) != 1) + 1) if len(units) else []
    pieces: list[Piece] = []
    begin = local_begin = 0
    for of_part in rows:
        for run in runs:
            pieces.append(Piece(begin + int(run[0]) * of_part, local_begin, len(run) * of_part))
            local_begin += len(run) * of_part
        begin += num_units * of_part
    return _joined(pieces)


@dataclass
class _Part:
    """What a :class:`DividedTensor` holds."""

    name: str
    local: Tensor
    division: TensorDivision
    before_reading: Callable[[], None] | None = None
    is_to_be_read: bool = False

    def copied(self, copy: Callable[[Tensor], Tensor]) -> _Part:
        """A copy, such as on another device, that keeps today's pieces."""
        pieces = tuple(self.division.pieces())
        return _Part(self.name, copy(local_of(self.local).data), replace(self.division, pieces=lambda: pieces))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Part:
        """As an asynchronous checkpoint wants it: on the CPU, whatever happens to the model meanwhile."""
        return self.copied(lambda tensor: tensor.to("cpu", copy=True))


class DividedTensor(torch.Tensor):
    """Stands for a tensor of which this rank holds a part; its shape is that of the whole tensor.

    Only DCP can use it. Pieces are looked up when DCP plans, so it stays right when units change hands.

    Args:
        name: of the tensor, for errors.
        local: what this rank holds, or a DTensor of which that is the local part. It is read and written in place.
        division: how the whole tensor is divided.
        before_reading: called before a file is read into it.
    """

    _part: _Part

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(
        cls, name: str, local: Tensor, division: TensorDivision, before_reading: Callable[[], None] | None = None
    ) -> DividedTensor:
        return cls._of(_Part(name, local, division, before_reading))

    @classmethod
    def _of(cls, part: _Part, device: torch.device | None = None) -> DividedTensor:
        tensor, shape = part.local, list(part.local.shape)
        shape[part.division.dim] = part.division.whole_size
        made: DividedTensor = make_wrapper(cls, shape, tensor.dtype, tensor.device if device is None else device)
        made._part = part
        made._chunks()  # what does not fit is told now and not when a file is half written
        return made

    @property
    def local(self) -> Tensor:
        """Return what this rank holds, without history."""
        return local_of(self._part.local).data

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        part = self.local
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(part), self.size()),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self._part.is_to_be_read = True  # DCP asks this before it reads, and not before it writes
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if self._part.is_to_be_read and self._part.before_reading is not None:
            self._part.before_reading()
        dim = self._part.division.dim
        for piece in self._part.division.pieces():
            if index.offset is not None and index.offset[dim] == piece.begin:
                return self.local.narrow(dim, piece.local_begin, piece.length)
        raise RuntimeError(
            f"{index.fqn}: this rank no longer holds what begins at {tuple(index.offset or ())}: do not move units "
            "while a checkpoint is saved or loaded"
        )

    def _chunks(self) -> list[ChunkStorageMetadata]:
        """Where each piece lies in the whole tensor."""
        tensor, division = self.local, self._part.division
        dim, pieces = division.dim, division.pieces()
        num_held = sum(piece.length for piece in pieces) + division.padding
        if tensor.shape[dim] != num_held:
            raise ValueError(
                f"{self._part.name}: its dimension {dim} has {tensor.shape[dim]} entries on this rank, which should be "
                f"{num_held} of {division.whole_size}: was the model changed after zeroresize.convert?"
            )
        chunks = []
        for piece in pieces:
            offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
            offsets[dim], sizes[dim] = piece.begin, piece.length
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        return chunks

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.clone.default or is_copy_to(func):
            return cls._of(args[0]._part.copied(lambda tensor: func(tensor, *args[1:], **kwargs)))
        if func is torch.ops.aten.new_empty.default:  # asynchronous checkpoints fill it with a copy of the part
            return cls._of(args[0]._part, kwargs.get("device"))
        _refuse(f"{func} of {next((one._part.name for one in args if isinstance(one, cls)), 'a part of a tensor')}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(f"pickling {self._part.name}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"DividedTensor({self._part.name}, whole shape {tuple(self.shape)}, on this rank {tuple(self.local.shape)})"
        )


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(  # Python hides a TypeError of an operator
        f"{what}: what zeroresize.sharded_state_dict returns is for torch.distributed.checkpoint only. For a state "
        "dictionary of ordinary tensors use `with balancer.at_home(): model.state_dict()`"
    )


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same, with neighbours as one piece."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and (last.begin + last.length, last.local_begin + last.length) == (piece.begin, piece.local_begin):
            joined[-1] = Piece(last.begin, last.local_begin, last.length + piece.length)
        elif piece.length:
            joined.append(piece)
    return joined


def part_of(
    name: str, tensor: Tensor, division: TensorDivision | None, before_reading: Callable[[], None] | None = None
) -> Tensor:
    """Return what DCP gets of a tensor of which this rank holds a part, or all where there is no division."""
    return tensor.data if division is None else DividedTensor(name, tensor, division, before_reading)
