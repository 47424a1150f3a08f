"""Checkpoints by torch.distributed.checkpoint (DCP), read without running what is in them."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from zeroresize.utils.checkpoint_files import plain_file, require_plain_file
from zeroresize.utils.checkpoint_index import read_index

#: How the names of a balancer's state begin: whose it is, and the ranks of its group; see control/balancer_state.py.
_OF_GROUP = re.compile(r"(.+)\.group (\d+(?:-\d+)*)(?: rank \d+)?\.")
#: How the names begin that a value which reads itself reads, by the name of that value in a checkpoint.
_optional_prefixes: dict[str, tuple[str, ...]] = {}


@runtime_checkable
class ReadsItself(Protocol):
    """A value that decides by what a checkpoint says which of its tensors are to be read, and in which shapes."""

    def read_itself(self, folder: str | os.PathLike[str]) -> None:
        """Read from the checkpoint in ``folder``, and change nothing but what is read into; not collective.

        Raises:
            ValueError: if something is missing or does not fit.
        """


def register_reads_itself(name: str, prefixes: Sequence[str]) -> None:
    """Let a checkpoint that has ``name`` lack names that begin with any of ``prefixes``.

    The value of that name, a :class:`ReadsItself`, decides which of them are read; DCP would want all of them to exist.
    """
    _optional_prefixes[name] = tuple(prefixes)


class CheckpointReader(FileSystemReader):
    """Reads a folder that ``dcp.save`` wrote, and runs no code that somebody has put there::

        dcp.load(zr.sharded_state_dict(model, optimizer), storage_reader=zr.CheckpointReader(folder))

    torch's own reader unpickles the index and every value that is no tensor, which runs whatever they name. This one
    admits DCP's own data classes in the index; elsewhere tensors, numbers, texts, lists, tuples and dictionaries, and
    classes that were allowed by ``torch.serialization.add_safe_globals``. The index and the files that it names are
    plain files of the folder: what is a link, a device or a pipe is not opened.

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
        path = Path(self.path) / (".metadata" if rank is None else f"__{rank}.metadata")
        require_plain_file(path)
        with path.open("rb") as stream:
            metadata = read_index(stream, str(path))
        for name in {storage.relative_path for storage in metadata.storage_data.values()}:
            with suppress(FileNotFoundError):  # which is an error where it is needed
                plain_file(self.path, name)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        for name, prefixes in _optional_prefixes.items():
            if name in metadata.state_dict_metadata:
                metadata.state_dict_metadata = _WithOptionalNames(metadata.state_dict_metadata, prefixes)
        if any(map(_OF_GROUP.match, metadata.state_dict_metadata)):
            metadata.state_dict_metadata = _OfGroups(metadata.state_dict_metadata)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for, file by file, and what a value that reads itself finds that it needs.

        Raises:
            ValueError: naming the file that cannot be read, or does not hold what the index says.
        """
        for value in getattr(planner, "state_dict", {}).values():
            if isinstance(value, ReadsItself):
                value.read_itself(self.path)
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        plain: Any = _PlainValues(planner, self.path)  # all that a planner is asked for
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), plain).wait()
            except Exception as error:  # damaged files raise whatever they come to
                reason = str(error) if isinstance(error, ValueError) else _reason(error)
                raise ValueError(f"{Path(self.path) / name}: {reason}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _OfGroups(dict[str, Any]):
    """An index by name in which a balancer that was saved by other ranks is an error, rather than a missing name."""

    def __init__(self, index: Mapping[str, Any]) -> None:
        super().__init__(index)
        self._index = index  # which may have names that it does not list
        self._groups: dict[str, set[str]] = {}
        for name in index:
            if (of_group := _OF_GROUP.match(name)) is not None:
                self._groups.setdefault(of_group[1], set()).add(of_group[2])

    def __contains__(self, name: object) -> bool:
        of_group = _OF_GROUP.match(name) if isinstance(name, str) else None
        if of_group is not None:
            key, here = of_group.groups()
            saved = self._groups.get(key, {here})
            if here not in saved:
                raise ValueError(
                    f"{key!r} was saved on {_ranks(min(saved))}, and is to be loaded on {_ranks(here)}: leave {key!r} "
                    "out of what is loaded, and it measures anew"
                )
        return name in self._index

    def __missing__(self, name: str) -> Any:
        return self._index[name]


def _ranks(group: str) -> str:
    """How many ranks a group has, and from which to which."""
    ranks = group.split("-")
    return f"{len(ranks)} ranks ({group if len(ranks) <= 8 else f'{ranks[0]}-…-{ranks[-1]}'})"


class _WithOptionalNames(dict[str, Any]):
    """An index by name in which names that begin with ``prefixes`` are empty tensors where they are missing."""

    def __init__(self, index: Mapping[str, Any], prefixes: tuple[str, ...]) -> None:
        super().__init__(index)
        self._prefixes = prefixes

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name.startswith(self._prefixes))

    def __missing__(self, name: str) -> TensorStorageMetadata:
        if name not in self:
            raise KeyError(name)
        return TensorStorageMetadata(TensorProperties(), torch.Size([0]), [])


class _PlainValues:
    """A planner that is given plain values only."""

    def __init__(self, planner: LoadPlanner, path: Any) -> None:
        self._planner, self._path = planner, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Planners unpickle what they get, so it is written anew from what was read."""
        plain, anew = plain_value(value, f"{self._path}: {read_item.storage_index.fqn}"), io.BytesIO()
        torch.save(plain, anew)
        anew.seek(0)
        self._planner.load_bytes(read_item, anew)


def plain_value(stream: io.BytesIO, what: str) -> Any:
    """Return what ``torch.save`` wrote, if reading it runs no code.

    Args:
        stream: the file that was written.
        what: names it in errors.

    Raises:
        ValueError: if it holds other classes than tensors and plain values; nothing of it has run.
    """
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise whatever they come to
        raise ValueError(
            f"{what}: not read, since it is damaged or of a class whose reading could run code ({_reason(error)}); "
            "classes that you trust are allowed by torch.serialization.add_safe_globals"
        ) from error


def _reason(error: Exception) -> str:
    """The part of torch's long message that says what is not allowed."""
    lines = [one.strip() for one in str(error).splitlines()]
    named = [one.partition(". Please")[0] for one in lines if "GLOBAL" in one]
    return next(iter(named or filter(None, lines)), type(error).__name__)
