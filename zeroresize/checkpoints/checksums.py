"""Checksums of what a checkpoint by torch.distributed.checkpoint (DCP) holds.

Every rank that writes adds an entry, :data:`CHECKSUMS`, in which all stands that it has given DCP to write: of each
piece of a tensor where it begins, its shape, dtype and CRC-32, and of each plain value the CRC-32. The index names the
entries with a number of their save, which they hold too, so that a file of another save is told from this one's.
Checksums are taken in a thread while DCP writes, or with a GPU just before: of what it writes, so of the copies where
it writes in the background.
"""

from __future__ import annotations

import io
import json
import math
import secrets
import zipfile
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from zeroresize.utils.codec import FORMAT, decoded, encoded, first_reason, require_format

#: The name of the entries.
CHECKSUMS = "zeroresize.checksums"
_PLAIN = (int, float, str, type(None))


@dataclass(frozen=True)
class SavedPiece:
    """What is known of a piece of a tensor, beside its name and where it begins."""

    shape: tuple[int, ...]
    dtype: str
    crc: int

    @classmethod
    def of(cls, entries: Tensor) -> SavedPiece:
        data = entries.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        memory: Any = data.numpy()
        return cls(tuple(entries.shape), str(entries.dtype), zlib.crc32(memory))


@dataclass(frozen=True)
class _Entry:
    """What one rank has written: pieces by name and by where they begin, the checksums of values by name."""

    save: int
    pieces: dict[str, dict[str, SavedPiece]] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)


class Checksums:
    """Takes the checksums of what this rank gives DCP to write."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, torch.Size], Future[SavedPiece]] = {}
        self._values: dict[str, int] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._save = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Checksums:
        """Those of tensors that an asynchronous checkpoint copies: others may be saved meanwhile."""
        copied = memo[id(self)] = Checksums()
        copied._values = dict(self._values)
        return copied

    def note(self, name: str, value: Any) -> None:
        """Take that of a plain value."""
        if _is_plain(value):
            self._values[name] = _crc_of(value)

    def begin(self, name: str, chunk: ChunkStorageMetadata, entries: Tensor) -> None:
        """Begin to take that of a piece, which does not change until it is written."""
        if entries.device.type != "cpu":
            torch.accelerator.current_stream(entries.device).synchronize()  # the thread has a stream of its own
        self._thread = self._thread or ThreadPoolExecutor(1, "checksums")
        self._pieces[name, chunk.offsets] = self._thread.submit(SavedPiece.of, entries)

    def begin_save(self) -> int:
        """Return a number of a save, which is no other one's."""
        self._save = secrets.randbits(62)
        return self._save

    def text(self) -> str:
        """Return this rank's entry, once all of it is known."""
        pieces: dict[str, dict[str, SavedPiece]] = {}
        for (name, begin), piece in self._pieces.items():
            pieces.setdefault(name, {})[_key(begin)] = piece.result()
        self._pieces = {}
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        return json.dumps({"format": FORMAT, "entry": encoded(_Entry(self._save, pieces, self._values))})


class SavedChecksums:
    """Compares what is read with the checksums of when it was written; knows nothing of checkpoints that have none.

    Args:
        index: of the checkpoint.
        read: returns the bytes of an entry of the index.
    """

    def __init__(self, index: Metadata, read: Callable[[MetadataIndex], bytes]) -> None:
        self._storage, self._read = index.storage_data or {}, read
        self._places: dict[str, list[MetadataIndex]] = {}
        for key in self._storage:
            if key.fqn.endswith(CHECKSUMS):
                self._places.setdefault(self._writer_of(key), []).append(key)
        self._entries: dict[MetadataIndex, _Entry] = {}
        named = [metadata for name, metadata in index.state_dict_metadata.items() if name.endswith(CHECKSUMS)]
        wanted = sum(len(metadata.chunks) for metadata in named if isinstance(metadata, TensorStorageMetadata))
        if wanted != sum(map(len, self._places.values())):
            raise ValueError("the index is damaged: it lacks checksums that it names")

    def require_whole(self, name: str, metadata: TensorStorageMetadata) -> None:
        """Raise ValueError unless the pieces that the index tells of a tensor are those that were written."""
        begins = [chunk.offsets for chunk in metadata.chunks]
        pieces = [self._piece(MetadataIndex(name, begin)) for begin in begins]
        if not any(pieces) and not self._is_known(name):
            return
        is_whole = len(set(begins)) == len(begins) and all(
            piece is not None and piece.shape == tuple(chunk.sizes)
            for piece, chunk in zip(pieces, metadata.chunks, strict=True)
        )
        if not is_whole or sum(math.prod(chunk.sizes) for chunk in metadata.chunks) != math.prod(metadata.size):
            raise ValueError(f"{name}: the index is damaged: its pieces are not those that were written")

    def piece_of(self, key: MetadataIndex, file: IO[bytes]) -> SavedPiece | None:
        """Return what was written of a piece in a file; None for what no rank tells of, if that is sound."""
        piece = self._piece(key)
        if piece is None:
            if self._is_known(key.fqn):
                raise ValueError(f"{key.fqn}: the index is damaged: it tells of a piece that was not written")
            file.seek(0)
            require_sound(file.read())
        return piece

    def require_same_value(self, name: str, value: Any) -> None:
        """Raise ValueError unless a value that was read is the one that was written, as far as a rank tells."""
        crc = next((entry.values[name] for entry in self._of(MetadataIndex(name)) if name in entry.values), None)
        if crc is not None and crc != _crc_of(value):
            raise ValueError(f"{name}: of another save: its checksum is not that of when it was written")

    def _piece(self, key: MetadataIndex) -> SavedPiece | None:
        pieces = (entry.pieces.get(key.fqn, {}).get(_key(key.offset or ())) for entry in self._of(key))
        return next(filter(None, pieces), None)

    def _is_known(self, name: str) -> bool:
        """Whether any rank has written pieces of a tensor."""
        return any(name in self._entry(key).pieces for keys in self._places.values() for key in keys)

    def _of(self, key: MetadataIndex) -> list[_Entry]:
        """The entries of the rank that has written something."""
        if key not in self._storage:
            return []
        return [self._entry(place) for place in self._places.get(self._writer_of(key), ())]

    def _entry(self, key: MetadataIndex) -> _Entry:
        if key not in self._entries:
            file = self._storage[key].relative_path
            try:
                values: Mapping[str, Any] = json.loads(self._read(key))
                number, written = values["format"], values["entry"]
            except OSError:
                raise
            except Exception as error:  # damaged files raise whatever they come to
                raise ValueError(f"{file}: damaged, or of another save: {first_reason(error)}") from error
            require_format(number, key.fqn)
            entry = decoded(_Entry, written, key.fqn)
            if (key.offset or ())[-1:] != (entry.save,):
                raise ValueError(f"{file}: of another save than the index")
            self._entries[key] = entry
        return self._entries[key]

    def _writer_of(self, key: MetadataIndex) -> str:
        """The files of a rank are numbered: ``__3_0.distcp``."""
        return str(self._storage[key].relative_path).rpartition("_")[0]


def require_sound(data: bytes) -> None:
    """Raise ValueError unless what ``torch.save`` wrote is as its format's own checksums say, which torch ignores."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"damaged: {damaged} has another checksum than when it was written")


def _key(begin: Any) -> str:
    return ",".join(map(str, begin))


def _is_plain(value: Any) -> bool:
    items = (*value, *value.values()) if isinstance(value, Mapping) else value
    return all(map(_is_plain, items)) if isinstance(items, list | tuple) else isinstance(items, _PLAIN)


def _crc_of(value: Any) -> int:
    return zlib.crc32(repr(value).encode())
