"""The index of a checkpoint by torch.distributed.checkpoint (DCP), read without running what is in it.

DCP writes its index, ``.metadata``, as a pickle, and a pickle calls whatever it names. Here nothing that it names is
looked up: every class is replaced by a record that keeps what it was called with. Of these records DCP's own data
classes are built, and anything else is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import IO, Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata

from zeroresize.utils.torch_private import classes_of_checkpoint_index

_MEMORY_FORMATS, _STORAGE_INFO = classes_of_checkpoint_index()
_METADATA, _FILESYSTEM = metadata.__name__, filesystem.__name__
_PLAIN = (type(None), bool, int, float, str, bytes)
_LAYOUTS = {str(one): one for one in (torch.strided, torch.sparse_coo, torch.sparse_csr)}


class _Record:
    """Stands for an object of a class; a subclass stands for what is named.

    Attributes:
        path: module and name.
        arguments: of the call that made it.
        state: as pickled.
    """

    path: ClassVar[tuple[str, str]]
    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> _Record:
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not _is_known((module, name)):
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which is none of the classes that torch.distributed.checkpoint writes"
            )
        return type(name, (_Record,), {"path": (module, name)})


def read_index(stream: IO[bytes], where: str) -> metadata.Metadata:
    """Return the index that DCP wrote as ``.metadata``."""
    try:
        index = _Builder()(_Unpickler(stream).load())
        if not isinstance(index, metadata.Metadata):
            raise ValueError(f"it holds a {type(index).__name__}")
        _require_sound(index)
    except Exception as error:  # damaged pickles raise whatever they come to
        reason = str(error) or type(error).__name__
        raise ValueError(f"{where}: not an index that torch.distributed.checkpoint wrote, refused: {reason}") from error
    return index


def _is_known(path: tuple[str, str]) -> bool:
    return path in _BUILDERS or _dtype(path) is not None


def _dtype(path: tuple[str, str]) -> torch.dtype | None:
    dtype = vars(torch).get(path[1]) if path[0] == "torch" else None
    return dtype if isinstance(dtype, torch.dtype) else None


class _Builder:
    """Builds real objects for records, each once, however often a pickle refers to it."""

    def __init__(self) -> None:
        #: By ``id``; the value is held, so that this is nobody else's.
        self._built: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        """``value`` with real objects for its records."""
        if type(value) in _PLAIN:
            return value
        if id(value) not in self._built:
            self._built[id(value)] = value, self._made(value)
        return self._built[id(value)][1]

    def _made(self, value: Any) -> Any:
        if isinstance(value, _Record):
            return _BUILDERS[value.path](value, self)
        if isinstance(value, type):
            dtype = _dtype(value.path) if issubclass(value, _Record) else None
            if dtype is None:
                raise ValueError(f"it holds the class {value.__name__} itself")
            return dtype
        if type(value) is dict:
            return {self(key): self(one) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self, value))
        raise ValueError(f"it holds a {type(value).__name__}")


_Build = Callable[[_Record, _Builder], Any]


def _of_class(kind: type) -> _Build:
    """Builds a data class of its fields by name."""
    names = {one.name for one in fields(kind)}

    def build(record: _Record, built: _Builder) -> Any:
        state = built(record.state or {})
        if record.arguments or not isinstance(state, dict) or not state.keys() <= names:
            raise ValueError(f"a {kind.__name__} has other fields than {sorted(names)}, which this torch knows")
        return kind(**state)

    return build


def _of_one(function: Callable[[Any], Any]) -> _Build:
    """Builds what is made of one plain value."""

    def build(record: _Record, built: _Builder) -> Any:
        (argument,) = record.arguments
        return function(built(argument))

    return build


def _size(values: Any) -> torch.Size:
    return torch.Size(_of_type(tuple, values))


def _tensor_properties(record: _Record, built: _Builder) -> metadata.TensorProperties:
    properties = metadata.TensorProperties()
    properties.__setstate__(_of_type(tuple, built(record.state)))
    _of_type(torch.dtype, properties.dtype)
    return properties


def _path(kind: type[PurePath]) -> _Build:
    return lambda record, _: kind(*(_of_type(str, one) for one in record.arguments))


_BUILDERS: dict[tuple[str, str], _Build] = {
    ("torch", "Size"): _of_one(_size),
    ("torch.serialization", "_get_layout"): _of_one(_LAYOUTS.__getitem__),
    (_METADATA, "_MEM_FORMAT_ENCODING"): _of_one(_MEMORY_FORMATS),
    (_METADATA, "TensorProperties"): _tensor_properties,
    **{
        (kind.__module__, kind.__name__): _of_class(kind)
        for kind in (
            metadata.Metadata,
            metadata.TensorStorageMetadata,
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            _STORAGE_INFO,
        )
    },
    # Where it was written, which is only told.
    **{
        (module, name): _path(kind)
        for module in ("pathlib", "pathlib._local")
        for name, kind in (
            ("PosixPath", PurePosixPath),
            ("PurePosixPath", PurePosixPath),
            ("WindowsPath", PureWindowsPath),
            ("PureWindowsPath", PureWindowsPath),
        )
    },
}


def _require_sound(index: metadata.Metadata) -> None:
    """Check what readers and planners rely on."""
    for name, tensor in _of_type(dict, index.state_dict_metadata).items():
        _of_type(str, name)
        if not isinstance(tensor, metadata.BytesStorageMetadata):
            _of_type(metadata.TensorStorageMetadata, tensor)
            _of_type(metadata.TensorProperties, tensor.properties)
            _of_type(torch.Size, tensor.size)
            for chunk in _of_type(list, tensor.chunks):
                _of_type(metadata.ChunkStorageMetadata, chunk)
                _of_type(torch.Size, chunk.offsets)
                _of_type(torch.Size, chunk.sizes)
    for key, place in _of_type(dict, index.storage_data).items():
        _of_type(metadata.MetadataIndex, key)
        _of_type(_STORAGE_INFO, place)
        _of_type(int, place.offset)
        _of_type(int, place.length)
        file = PurePath(_of_type(str, place.relative_path))
        if file.is_absolute() or ".." in file.parts:
            raise ValueError(f"{key.fqn} is in {file}, outside of the checkpoint")
    if index.storage_meta is not None:
        _of_type(metadata.StorageMeta, index.storage_meta)


def _of_type(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"it holds a {type(value).__name__} where a {kind.__name__} belongs")
    return value
