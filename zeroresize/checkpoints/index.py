"""The index of a checkpoint by torch.distributed.checkpoint (DCP), read without running what is in it.

DCP writes its index, ``.metadata``, as a pickle, and a pickle calls whatever it names, and may change it. So what it
names is never given to it: a class is a record, which becomes an object of DCP's own data class once its fields are
there, and a function is a new one. Anything else is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import IO, Any, ClassVar

import torch
from torch.distributed.checkpoint import metadata

from zeroresize.utils.torch_private import classes_of_checkpoint_index

_MEMORY_FORMATS, _STORAGE_INFO = classes_of_checkpoint_index()
_LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr)}
_CLASSES: dict[tuple[str, str], type] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.TensorProperties,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        _STORAGE_INFO,
    )
}
#: Where it was written, which is only told.
_PATHS: dict[str, type[PurePath]] = {
    **dict.fromkeys(("PosixPath", "PurePosixPath"), PurePosixPath),
    **dict.fromkeys(("WindowsPath", "PureWindowsPath"), PureWindowsPath),
}


def read_index(stream: IO[bytes], where: str) -> metadata.Metadata:
    """Return the index that DCP wrote as ``.metadata``."""
    try:
        index: metadata.Metadata = _of_type(metadata.Metadata, _Unpickler(stream).load())
        _require_sound(index)
    except Exception as error:  # damaged pickles raise whatever they come to
        reason = str(error) or type(error).__name__
        raise ValueError(f"{where}: not an index that torch.distributed.checkpoint wrote, refused: {reason}") from error
    return index


class _Record:
    """Stands for an object of ``kind`` until its fields have been read; that of a class without fields has them all."""

    kind: ClassVar[type]

    def __new__(cls) -> Any:
        return super().__new__(cls) if fields(cls.kind) else cls.kind()

    def __setstate__(self, state: Any) -> None:
        kind: Any = self.kind
        if kind is metadata.TensorProperties:
            dtype, layout, requires_grad, memory_format, pin_memory = _of_type(tuple, state)
            made = kind(_of_type(torch.dtype, dtype))
            made.__setstate__((dtype, layout, requires_grad, _MEMORY_FORMATS(memory_format), pin_memory))
        else:
            made = kind(**_of_type(dict, state))  # a field that this torch does not know is an error
        self.__class__ = kind
        vars(self).update(vars(made))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return type(name, (_Record,), {"kind": _CLASSES[module, name]})
        dtype = vars(torch).get(name) if module == "torch" else None
        made = dtype if isinstance(dtype, torch.dtype) else _function((module, name))
        if made is None:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which is none of the classes that torch.distributed.checkpoint writes"
            )
        return made


def _function(path: tuple[str, str]) -> Callable[..., Any] | None:
    """A new function, whatever the pickle does to it."""
    module, name = path
    if path == ("torch", "Size"):
        return lambda values: torch.Size(_of_type(tuple, values))
    if path == ("torch.serialization", "_get_layout"):
        return lambda text: _LAYOUTS[text]
    if path == (metadata.__name__, "_MEM_FORMAT_ENCODING"):
        return lambda number: _of_type(int, number)  # its members are torch's, for good
    if module in ("pathlib", "pathlib._local") and name in _PATHS:
        return lambda *parts: _PATHS[name](*(_of_type(str, part) for part in parts))
    return None


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
