"""Files that can hold tensors and plain values only, as safetensors and JSON: reading them runs no code.

A value that is neither finite nor a number is kept as Python's ``json`` writes it (``NaN``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

#: Stands for a tensor among plain values: {_TENSOR: its name in the other file}.
_TENSOR = "$tensor"
_DEEPEST = 50


def write_values(path: Path, values: Any) -> None:
    """Write plain values as JSON.

    Raises:
        OSError: naming the file, if it cannot be written.
    """
    with _named(path):
        path.write_text(json.dumps(values), encoding="utf-8")


def read_values(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        ValueError: naming the file, if it cannot be read, holds none, or is nested more than 50 deep.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8 and not JSON are ValueErrors
        raise ValueError(f"{path}: expected a JSON object: {_reason(error)}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(values).__name__}")
    if _is_deeper(values, _DEEPEST):
        raise ValueError(f"{path}: expected a JSON object: nested more than {_DEEPEST} deep")
    return values


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name.

    Raises:
        OSError: naming the file, if it cannot be written.
    """
    with _named(path):
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """What :func:`write_tensors` wrote, as ``safetensors.safe_open`` gives it, on CPU, to be read within the block.

    Raises:
        ValueError: naming the file, if it or one of its tensors cannot be read or is no such file.
    """
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: expected tensors: {_reason(error)}") from error


def state_files(path: Path) -> tuple[Path, Path]:
    """The two files of a state that is called ``path``: its values and its tensors."""
    return path.with_name(f"{path.name}.json"), path.with_name(f"{path.name}.safetensors")


def write_state(path: Path, state: Any) -> None:
    """Write plain values that have tensors among them; tuples become lists.

    Raises:
        OSError: naming the file, if it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    values_file, tensors_file = state_files(path)
    write_values(values_file, _without_tensors(state, tensors))
    write_tensors(tensors_file, tensors)


def read_state(path: Path) -> dict[str, Any]:
    """What :func:`write_state` wrote.

    Raises:
        ValueError: naming the file, if one cannot be read or is no such file.
    """
    values_file, tensors_file = state_files(path)
    values = read_values(values_file)
    with open_tensors(tensors_file) as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
    try:
        return _with_tensors(values, tensors)
    except KeyError as error:
        raise ValueError(f"{tensors_file}: the tensor {error} is missing, which {values_file.name} names") from error


def _without_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """``value`` with its tensors moved to ``tensors``."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.clone()  # two names may share their memory, two entries of a file may not
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {key: _without_tensors(one, tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(one, tensors) for one in value]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[str(value[_TENSOR])]
        return {key: _with_tensors(one, tensors) for key, one in value.items()}
    return [_with_tensors(one, tensors) for one in value] if isinstance(value, list) else value


def _is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects are nested more than ``most`` deep."""
    level = [value]
    for _ in range(most + 1):
        nested = [one for one in level if isinstance(one, dict | list)]
        level = [inner for one in nested for inner in (one.values() if isinstance(one, dict) else one)]
        if not nested:
            return False
    return True


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of writing name the file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Without the name of the file, which is told beside it."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
