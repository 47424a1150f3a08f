"""torch.distributed.checkpoint (DCP) writes and reads tensors of which every rank holds a part, or all.

A rank's part is a number of pieces of one dimension, which lie one after another. Every piece becomes a chunk of the
whole tensor, so a file holds whole tensors, whoever wrote or reads which part of them. Of what is written checksums are
taken, see :mod:`zeroresize.checkpoints.checksums`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zeroresize.checkpoints.checksums import CHECKSUMS, Checksums
from zeroresize.layers.local_parts import local_of
from zeroresize.plan.layout import Piece, unit_pieces
from zeroresize.utils.torch_private import is_copy_to, is_dtensor, make_wrapper, no_torch_function

_EMPTY = ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))


@dataclass(frozen=True)
class TensorDivision:
    """Describes how a tensor is divided over the ranks of a group.

    Attributes:
        dim: along which it is divided.
        whole_size: of that dimension, of all ranks together.
        pieces: what this rank holds at the time of the call.
        padding: how many entries this rank holds beyond the whole tensor; they are neither written nor read.
        rows: the first of dimension 0 that this rank holds of that, and the one behind the last, where data-parallel
            ranks hold shards of it; None where it holds all.
    """

    dim: int
    whole_size: int
    pieces: Callable[[], Sequence[Piece]]
    padding: int = 0
    rows: Callable[[], tuple[int, int]] | None = None

    def held(self) -> tuple[Sequence[Piece], int, int]:
        """Return the pieces of which this rank has entries, where these begin in dimension 0, if not by pieces, and how
        many entries there are with padding, which lies behind all pieces.
        """
        pieces = self.pieces()
        num_held = sum(piece.length for piece in pieces) + self.padding
        if self.rows is None:
            return pieces, 0, num_held
        begin, end = self.rows()
        if self.dim != 0:
            return pieces if end > begin else (), begin, num_held
        cuts = [(piece, max(piece.local_begin, begin), min(piece.local_begin + piece.length, end)) for piece in pieces]
        return (
            [
                Piece(piece.begin + first - piece.local_begin, first - begin, last - first)
                for piece, first, last in cuts
                if last > first
            ],
            0,
            min(end, num_held) - min(begin, num_held),
        )


def _in_parts(dtensor: Any, begin: int) -> TensorDivision | None:
    """How a DTensor is divided of which ranks hold a share of each of equal parts, which torch takes for one piece."""
    mesh, dims = dtensor.device_mesh, [getattr(each, "dim", None) for each in dtensor.placements]
    at = next((at for at, each in enumerate(dtensor.placements) if getattr(each, "split_factor", 1) > 1), None)
    if at is None or dims.count(dims[at]) > 1:  # where a dimension is divided twice it tells the order
        return None
    dim, parts = dtensor.placements[at].dim, dtensor.placements[at].split_factor
    held = begin, begin + len(local_of(dtensor))
    units = np.arange(dtensor.shape[dim] // parts)
    pieces = unit_pieces(np.array_split(units, mesh.size(at))[mesh.get_local_rank(at)], len(units), (1,) * parts)
    return TensorDivision(dim, len(units) * parts, lambda: pieces, rows=(lambda: held) if dim else None)


@dataclass
class _Part:
    """What a :class:`DividedTensor` holds; ``division`` is where all of it begins where it is a single piece."""

    name: str
    local: Tensor
    shape: torch.Size
    division: TensorDivision | torch.Size
    checksums: Checksums
    before_reading: Callable[[], None] | None = None
    is_to_be_read: bool = False

    def copied(self, copy: Callable[[Tensor], Tensor]) -> _Part:
        """A copy, such as on another device, that keeps today's pieces."""
        division = self.division
        if isinstance(division, TensorDivision):
            pieces, rows = tuple(division.pieces()), division.rows and division.rows()
            division = replace(division, pieces=lambda: pieces, rows=rows and (lambda: rows))
        return _Part(self.name, copy(local_of(self.local).data), self.shape, division, self.checksums)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Part:
        """As an asynchronous checkpoint wants it: on the CPU, whatever happens to the model meanwhile."""
        copied = self.copied(lambda tensor: tensor.to("cpu", copy=True))
        copied.checksums = deepcopy(self.checksums, memo)
        return copied

    def pieces(self) -> list[tuple[ChunkStorageMetadata, Tensor]]:
        """Where each piece lies in the whole tensor, and its entries here."""
        tensor, division = local_of(self.local).data, self.division
        if isinstance(division, torch.Size):
            return [(ChunkStorageMetadata(division, tensor.shape), tensor)]
        dim, (pieces, first, num_held) = division.dim, division.held()
        if tensor.shape[dim] != num_held:
            raise ValueError(
                f"{self.name}: its dimension {dim} has {tensor.shape[dim]} entries on this rank, which should be "
                f"{num_held} of {division.whole_size}: was the model changed after zeroresize.convert?"
            )
        chunks = []
        for piece in pieces:
            offsets = [first] + [0] * (tensor.dim() - 1)
            offsets[dim], entries = piece.begin, tensor.narrow(dim, piece.local_begin, piece.length)
            chunks.append((ChunkStorageMetadata(torch.Size(offsets), entries.shape), entries))
        return chunks


class DividedTensor(torch.Tensor):
    """Stands for a tensor of which this rank holds a part, or all; its shape is that of the whole tensor.

    Only DCP can use it. Pieces are looked up when DCP plans, so it stays right when units change hands.

    Args:
        name: of the tensor, for errors.
        local: what this rank holds, or a DTensor of which that is the local part. It is read and written in place.
        division: how the whole tensor is divided; None for a tensor that this rank holds all of, or a DTensor whose
            placements tell it.
        checksums: are told of what DCP is given to write.
        before_reading: called before a file is read into it.
    """

    _part: _Part

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(
        cls,
        name: str,
        local: Tensor,
        division: TensorDivision | None,
        checksums: Checksums,
        before_reading: Callable[[], None] | None = None,
    ) -> DividedTensor:
        shape, where = list(local.shape), division or torch.Size([0] * local.dim())
        if division is not None:
            shape[division.dim] = division.whole_size
        elif is_dtensor(local):
            if local.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
                return local.data  # type: ignore[return-value]  # of other ranks, which DCP knows
            (chunk,) = local.data.__create_chunk_list__()  # type: ignore[attr-defined]
            where = _in_parts(local, chunk.offsets[0]) or chunk.offsets
        return cls._of(_Part(name, local, torch.Size(shape), where, checksums, before_reading))

    @classmethod
    def _of(cls, part: _Part, device: torch.device | None = None) -> DividedTensor:
        made: DividedTensor = make_wrapper(
            cls, part.shape, part.local.dtype, part.local.device if device is None else device
        )
        made._part = part
        part.pieces()  # what does not fit is told now and not when a file is half written
        return made

    @property
    def local(self) -> Tensor:
        """Return what this rank holds, without history."""
        return local_of(self._part.local).data

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        items = []
        for chunk, entries in self._part.pieces():
            self._part.checksums.begin(fqn, chunk, entries)
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(entries), self._part.shape)
            items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self._part.is_to_be_read = True  # DCP asks this before it reads, and not before it writes
        return [chunk for chunk, _ in self._part.pieces()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if self._part.is_to_be_read and self._part.before_reading is not None:
            self._part.before_reading()
        for chunk, entries in self._part.pieces():
            if index.offset == chunk.offsets:
                return entries
        raise RuntimeError(
            f"{index.fqn}: this rank no longer holds what begins at {tuple(index.offset or ())}: do not move units "
            "while a checkpoint is saved or loaded"
        )

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


class ChecksumsEntry(DividedTensor):
    """Stands for this rank's checksums of all others: nothing, in whose place DCP writes bytes and reads nothing."""

    @staticmethod
    def __new__(cls, checksums: Checksums) -> ChecksumsEntry:
        made: Any = DividedTensor.__new__(cls, CHECKSUMS, torch.zeros(0, dtype=torch.uint8), None, checksums)
        return made

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        # The index names it so; of what has no element, DCP finds no two pieces that overlap, and nothing to read.
        key = MetadataIndex(fqn, torch.Size([rank, self._part.checksums.begin_save()]))
        data = TensorWriteData(_EMPTY, TensorProperties(torch.uint8), torch.Size([0]))
        return [WriteItem(key, WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return torch.frombuffer(bytearray(self._part.checksums.text().encode()), dtype=torch.uint8)


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(  # Python hides a TypeError of an operator
        f"{what}: what zeroresize.sharded_state_dict returns is for torch.distributed.checkpoint only. For a state "
        "dictionary of ordinary tensors use `with balancer.at_home(): model.state_dict()`"
    )
