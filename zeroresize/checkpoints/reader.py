"""Checkpoints by torch.distributed.checkpoint (DCP), read without running what is in them."""

from __future__ import annotations

import concurrent.futures
import io
import logging
import os
import re
import stat
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePath
from typing import IO, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from zeroresize.checkpoints.checksums import CHECKSUMS, SavedChecksums, SavedPiece, require_sound
from zeroresize.checkpoints.index import read_index
from zeroresize.utils.checked import checked
from zeroresize.utils.codec import first_reason, plain_value, require_format

logger = logging.getLogger(__name__)

#: How the names of a balancer's state begin: whose it is, and the ranks of its group; see control/balancer_state.py.
_OF_GROUP = re.compile(r"(.+)\.group (\d+(?:-\d+)*)(?: rank \d+)?\.")
#: The number of the format in which an optimizer's state was written; see checkpoints/optimizer_state.py.
_FORMAT = "optimizer.format"
#: A pipeline's entry, which decides what else is read of a checkpoint: names that begin so may be missing.
PIPELINE_SETTINGS = "pipeline.settings"
_OF_PIPELINE = ("layers.", "optimizer.layers.", "pipeline.layers.")


@runtime_checkable
class ReadsItself(Protocol):
    """A value that decides by what a checkpoint says which of its tensors are to be read, and in which shapes."""

    def read_itself(self, folder: str | os.PathLike[str]) -> None:
        """Read from the checkpoint in ``folder``, and change nothing but what is read into; not collective."""


@checked()
class CheckpointReader(FileSystemReader):
    """Reads a folder that ``dcp.save`` wrote, and runs no code that somebody has put there::

        dcp.load(zr.sharded_state_dict(model, optimizer), storage_reader=zr.CheckpointReader(folder))

    torch's own reader unpickles the index and every value that is no tensor, which runs whatever they name. This one
    admits DCP's own data classes in the index; elsewhere tensors, numbers, texts, lists, tuples and dictionaries, and
    classes that were allowed by ``torch.serialization.add_safe_globals``. The index and the files that it names are
    plain files of the folder: what is a link, a device or a pipe is not opened.

    What ``zr.sharded_state_dict`` gave to write is compared with the checksums of then, of which torch's own reader
    knows nothing; of everything else the checksums are those of ``torch.save``'s format.

    Args:
        path: the folder.

    Raises:
        ValueError: from ``read_metadata`` and ``read_data`` for anything else, and for a balancer that was saved by
            other ranks; ``dcp.load`` raises a CheckpointException with it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index, or that of one rank (``rank``) where each has written an index of its own.

        Raises:
            ValueError: if the index is damaged, or names anything else than DCP's own data.
        """
        rank = kwargs.get("rank")
        path = _plain_file(self.path, ".metadata" if rank is None else f"__{rank}.metadata")
        with path.open("rb") as stream:
            metadata = read_index(stream, str(path))
        for name in {storage.relative_path for storage in metadata.storage_data.values()}:
            with suppress(FileNotFoundError):  # which is an error where it is needed
                _plain_file(self.path, name)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self.storage_data = metadata.storage_data
        self._saved = SavedChecksums(metadata, self._bytes_of)
        metadata.state_dict_metadata = _Index(metadata.state_dict_metadata, self._saved)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for, values before tensors, and what a value that reads itself finds that it needs.

        Raises:
            ValueError: naming the file that cannot be read, or does not hold what the index says.
        """
        for value in getattr(planner, "state_dict", {}).values():
            if isinstance(value, ReadsItself):
                value.read_itself(self.path)
        by_file: dict[tuple[bool, str], list[ReadItem]] = {}
        for item in plan.items:
            file = self.storage_data[item.storage_index].relative_path
            by_file.setdefault((item.type is not LoadItemType.BYTE_IO, file), []).append(item)
        for (is_of_pieces, name), items in sorted(by_file.items(), key=lambda entry: entry[0]):
            try:
                with _plain_file(self.path, name).open("rb") as stream:
                    (self._read_pieces if is_of_pieces else self._read_values)(items, stream, planner)
            except Exception as error:  # damaged files raise whatever they come to
                reason = str(error) if isinstance(error, ValueError) else first_reason(error)
                raise ValueError(f"{Path(self.path) / name}: {reason}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _opened(self, item: ReadItem, stream: IO[bytes]) -> Any:
        place = self.storage_data[item.storage_index]
        raw = self._slice_file(stream, place)
        return self.transforms.transform_load_stream(item, place.transform_descriptors or (), raw)

    def _read_values(self, items: list[ReadItem], stream: IO[bytes], planner: LoadPlanner) -> None:
        """Planners unpickle what they get, so it is written anew from what was read."""
        for item in items:
            name, written, anew = item.storage_index.fqn, self._opened(item, stream).read(), io.BytesIO()
            require_sound(written)
            plain = plain_value(io.BytesIO(written), f"{self.path}: {name}")
            self._saved.require_same_value(name, plain)
            if name == _FORMAT:  # before tensors are read, which go where they belong at once
                require_format(plain, "optimizer")
            torch.save(plain, anew)
            anew.seek(0)
            planner.load_bytes(item, anew)

    def _read_pieces(self, items: list[ReadItem], stream: IO[bytes], planner: LoadPlanner) -> None:
        """The checksum of each is taken while the next is read."""
        comparisons: deque[tuple[str, SavedPiece, concurrent.futures.Future[SavedPiece]]] = deque()
        with ThreadPoolExecutor(1, "checksums") as thread:
            for item in items:
                key, data = item.storage_index, self._opened(item, stream)
                data = data if data.seekable() else io.BytesIO(data.read())
                piece = torch.load(data, map_location="cpu", weights_only=True)
                written = self._saved.piece_of(key, data)
                if written is not None:
                    comparisons.append((key.fqn, written, thread.submit(SavedPiece.of, piece)))
                _put(piece, item, planner)
                if len(comparisons) > 1:
                    _require_same(*comparisons.popleft())
            for comparison in comparisons:
                _require_same(*comparison)

    def _bytes_of(self, key: MetadataIndex) -> bytes:
        """Those of an entry of the index that is a tensor of bytes."""
        place = self.storage_data[key]
        with _plain_file(self.path, place.relative_path).open("rb") as stream:
            data = self._slice_file(stream, place).read()
        require_sound(data)
        return bytes(torch.load(io.BytesIO(data), weights_only=True).numpy())


def _put(piece: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    """Put what is wanted of a piece where it belongs."""
    for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        piece = piece.narrow(dim, begin, length)
    target = planner.resolve_tensor(item).detach()
    if target.shape != piece.shape:
        raise ValueError(
            f"{item.storage_index.fqn}: of shape {tuple(piece.shape)}, where {tuple(target.shape)} is expected"
        )
    target.copy_(piece)
    planner.commit_tensor(item, target)


def _require_same(name: str, written: SavedPiece, read: concurrent.futures.Future[SavedPiece]) -> None:
    if read.result() != written:
        raise ValueError(f"{name}: damaged, or of another save: its checksum is not the saved one")


class _Index(dict[str, Any]):
    """An index by name: what a pipeline reads by itself may be missing, and a balancer of other ranks is an error.

    Tensors of which pieces are not as they were written are errors, too.
    """

    def __init__(self, index: dict[str, Any], saved: SavedChecksums) -> None:
        super().__init__(index)
        self._saved = saved

    def __getitem__(self, name: str) -> Any:
        metadata = super().__getitem__(name)
        if isinstance(metadata, TensorStorageMetadata) and not name.endswith(CHECKSUMS):
            self._saved.require_whole(name, metadata)
        return metadata

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name) or not isinstance(name, str):
            return super().__contains__(name)
        if super().__contains__(PIPELINE_SETTINGS) and name.startswith(_OF_PIPELINE):
            return True
        if name.endswith(CHECKSUMS):
            if not (super().__contains__(PIPELINE_SETTINGS) or super().__contains__(_FORMAT)):
                return True  # others have made it
            logger.warning(
                "no %s: this checkpoint is of before there were any, or its index is damaged; to read it all the same, "
                "take %r out of what is loaded, and nothing is compared", name, name,
            )  # fmt: skip
        if (wanted := _OF_GROUP.match(name)) is not None:
            key, here = wanted.groups()
            saved = {match[2] for match in map(_OF_GROUP.match, self) if match is not None and match[1] == key}
            if saved and here not in saved:
                raise ValueError(
                    f"{key!r} was saved on {_ranks(min(saved))}, and is to be loaded on {_ranks(here)}: leave {key!r} "
                    "out of what is loaded, and it measures anew"
                )
        return False

    def __missing__(self, name: str) -> TensorStorageMetadata:
        if name not in self:
            raise KeyError(name)
        if name.endswith(CHECKSUMS):
            logger.warning("nothing is compared: this checkpoint holds no checksums of zr.sharded_state_dict")
        return TensorStorageMetadata(TensorProperties(), torch.Size([0]), [])


def _ranks(group: str) -> str:
    return f"{group.count('-') + 1} ranks ({group})"


def _plain_file(folder: str | os.PathLike[str], name: str) -> Path:
    """The path of a plain file in ``folder``, looked at and not opened; ValueError for a name that leads elsewhere."""
    # Of a drive or a stream of Windows, too, should a checkpoint come from or go there.
    if name in ("", ".", "..") or "\0" in name or PurePath(name).name != name or "\\" in name or ":" in name:
        raise ValueError(f"{os.fspath(folder)}: {name!r} is not the name of a file in it, refused")
    path = Path(folder) / name
    # Reading a device or a pipe may never end, and a link leads elsewhere.
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{path}: no plain file (a link, a device, a pipe or a folder), refused")
    return path
