"""Grids of runs: YAML files of a configuration of vit_examples, seeds, and named cells with overrides of it.

``ranks`` among a cell's overrides is its own number of ranks; the grid's ``ranks`` is what the others have. ``shared``
overrides are of all cells; those of the section ``balance`` reach the cells in whose mode they have an effect.
``cells`` may also name another grid beside it, whose cells it then takes: the same comparison at another scale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vit_examples.checkpoint import EPOCHS
from vit_examples.config_file import READER, load_config
from vit_examples.harness.config_reader import parse_override
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import without_effect
from zeroresize.config.paper import dotted
from zeroresize.utils.value_checks import at_least, known_keys
from zeroresize.utils.yaml_values import read_yaml

#: What the study itself sets, of every run.
_STUDY_KEYS = ("training.seed", "balance.seed", "output.folder")
#: Bytes of a folder's name that every file system allows.
_LONGEST_NAME = 240
GRID_KEYS = ("config", "ranks", "seeds", "shared", "cells")


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        settings: all that it is besides its seed, on one line: what a finished run is known by.
        overrides: the same for the command line, with its seed and folder.
        ranks: on how many it trains.
        epochs: how many it trains.
    """

    name: str
    seed: int
    settings: str
    overrides: tuple[str, ...]
    ranks: int
    epochs: int
    folder: Path

    @property
    def summary_file(self) -> Path:
        return self.folder / "summary.json"

    @property
    def settings_file(self) -> Path:
        return self.folder / "settings.yaml"

    @property
    def base_file(self) -> Path:
        return self.folder / "base.yaml"

    @property
    def checkpoint_folder(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def key(self) -> tuple[str, str]:
        return self.name, str(self.seed)

    @property
    def checkpoint(self) -> Path | None:
        """The newest that is complete."""
        return EPOCHS.newest(self.checkpoint_folder)

    @property
    def settings_and_base(self) -> tuple[str, str]:
        """The settings and the base of the run in its folder; empty where they are not told."""
        settings, base = (_text_of(file) if file.is_file() else "" for file in (self.settings_file, self.base_file))
        return settings, base

    def can_go_on(self, base: str) -> bool:
        """Whether there is a checkpoint of a run of these settings and this base that has epochs left."""
        newest = self.checkpoint
        is_same = self.settings_and_base == (self.settings, base)
        return newest is not None and is_same and EPOCHS.number_of(newest) < self.epochs

    def row(self) -> dict[str, Any] | None:
        """One flat row with the commit, versions, settings and base that it ran with, if the run is finished.

        Raises:
            ValueError: naming the file, if ``summary.json`` is of something else than a run.
        """
        settings, base = self.settings_and_base
        try:
            summary = json.loads(self.summary_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # there is none, or no whole one
            return None
        if not settings:
            return None
        if not (isinstance(summary, Mapping) and isinstance(summary.get("versions"), Mapping)):
            raise ValueError(
                f"{self.summary_file}: not the summary of a run: delete {self.folder} and its cell runs again"
            )
        plain = {key: value for key, value in summary.items() if not isinstance(value, Mapping)}
        versions = {f"version_{name}": version for name, version in summary["versions"].items()}
        return {"cell": self.name, "seed": self.seed, **plain, **versions, "settings": settings, "base": base}


@dataclass(frozen=True)
class Study:
    """A grid file, read and checked.

    Attributes:
        base: the settings of the file ``config`` but for its output folder, on one line: what cells are changes of.
    """

    name: str
    config: str
    base: str
    cells: tuple[Cell, ...]


def read_study(
    path: Path, output: Path, *, config: str | None = None, ranks: int | None = None, changes: Sequence[str] = ()
) -> Study:
    """Read a grid; every cell's configuration is checked before any runs.

    Args:
        output: every cell gets a folder in there, in one that is named after the grid, and ``config`` and ``ranks`` if
            those are given.
        config, ranks: instead of the grid's own, and of the cells'.
        changes: ``section.key=value``, which every cell takes instead of its own.

    Raises:
        ValueError: naming the file and the key or cell that is wrong, or two cells that would have one folder.
    """
    document = _read_grid(path)
    grid_cells = document["cells"]
    if isinstance(grid_cells, str):
        grid_cells = _read_grid(path.with_name(grid_cells))["cells"]
    if not isinstance(grid_cells, Mapping):
        raise ValueError(f"{path}: 'cells' must be a mapping, or the name of a grid that has one; got {grid_cells!r}")
    named = ([Path(config).stem] if config is not None else []) + ([f"{ranks}ranks"] if ranks is not None else [])
    name = "-".join([path.stem, *named])
    changed = dict(map(parse_override, changes))
    config = config or document["config"]
    common = {**document.get("shared", {}), **changed}
    idle: set[str] | None = None
    cells: dict[Path, Cell] = {}
    for cell in grid_cells:
        require_name(path, cell)
    for seed in document.get("seeds", [0]):
        for cell, changes_of_cell in grid_cells.items():
            folder = output / name / slug(cell) / f"seed{seed}"
            cell_settings = dict(changes_of_cell or {})
            cell_ranks = cell_settings.pop("ranks", document.get("ranks", 2))
            num_ranks = cell_ranks if ranks is None else ranks
            settings = {**document.get("shared", {}), **cell_settings, **changed}
            if taken := [key for key in _STUDY_KEYS if key in settings]:
                raise ValueError(f"{path}, cell {cell!r}: {taken} are set by the study itself, by 'seeds' and --output")
            values = {**settings, **dict(zip(_STUDY_KEYS, (seed, seed, str(folder)), strict=True))}
            idle_in_cell = _without_effect(config, values) & (common.keys() - cell_settings.keys())
            idle = idle_in_cell if idle is None else idle & idle_in_cell
            overrides = tuple(f"{key}={as_yaml(value)}" for key, value in values.items() if key not in idle_in_cell)
            try:
                at_least("ranks", num_ranks, 1)
                run = load_config(config, overrides)
                run.validate_group_size(num_ranks)
            except ValueError as error:
                raise ValueError(f"{path}, cell {cell!r}: {error}") from error
            if folder in cells:
                other = cells[folder]
                raise ValueError(
                    f"{path}: cell {cell!r}, seed {seed}, and cell {other.name!r}, seed {other.seed}, would both run "
                    f"in {folder}: call one of them differently"
                )
            in_one_line = as_yaml({"config": config, "ranks": num_ranks, **settings})
            cells[folder] = Cell(cell, seed, in_one_line, overrides, num_ranks, run.training.epochs, folder)
    if idle:
        raise ValueError(f"{path}: {sorted(idle)} of 'shared' or --set have no effect in the mode of any cell")
    return Study(name, config, base_settings(config), tuple(cells.values()))


def _without_effect(config: str, values: Mapping[str, Any]) -> set[str]:
    """Those of ``values`` for ``balance`` that have no effect beside the others."""
    document = read_yaml(READER.path_of(config))
    base = document.get("balance") if isinstance(document, Mapping) else None
    balance = {
        **BalanceConfig(mode="off").to_flat_dict(),
        **(dotted(base) if isinstance(base, Mapping) else {}),  # what is none is told by load_config
        **{key.removeprefix("balance."): value for key, value in values.items() if key.startswith("balance.")},
    }
    return {f"balance.{key}" for key in without_effect(balance)} & values.keys()


def _read_grid(path: Path) -> Mapping[str, Any]:
    document = read_yaml(path)
    try:
        known_keys("key", document, GRID_KEYS)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if missing := {"config", "cells"} - set(document):
        raise ValueError(f"{path}: {' and '.join(map(repr, sorted(missing)))} must be given")
    return document


def base_settings(config: str) -> str:
    """A configuration file's own settings by ``section.key``, but for its output folder.

    Raises:
        ValueError: if there is no such file.
    """
    flat: dict[str, Any] = {}
    for section, values in read_yaml(READER.path_of(config)).items():
        if isinstance(values, Mapping):
            flat |= {f"{section}.{key}": value for key, value in dotted(values).items()}
        else:
            flat[section] = values
    flat.pop("output.folder", None)
    return as_yaml(flat)


def as_yaml(value: Any) -> str:
    """On one line; unlike JSON it keeps keys that are numbers."""
    return yaml.safe_dump(value, default_flow_style=True, width=2**16).removesuffix("...\n").strip()


def require_name(path: Path, cell: Any) -> None:
    """Raises ValueError where the name of a cell of the grid ``path`` is not one of a folder below the study's.

    A slash within it is none of a path, as in ``γ=1/2``.
    """
    parts = str(cell).replace("\\", "/").split("/")
    if not isinstance(cell, str) or not cell.strip() or not parts[0] or {".", ".."} & set(parts):
        raise ValueError(
            f"{path}: a cell cannot be called {cell!r}: a text is needed that begins with no slash and has no '.' or "
            "'..' alone or between slashes (names that are numbers in quotes)"
        )
    if len(slug(cell).encode()) > _LONGEST_NAME:
        raise ValueError(f"{path}: cell {cell!r}: {_LONGEST_NAME} bytes are allowed for a name")


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: damaged: delete {file.parent} and its cell runs again: {error}") from error


def slug(name: str) -> str:
    """A cell's name as a folder's: letters of any alphabet stay."""
    return re.sub(r"[^\w.=-]+", "_", name.replace("/", "-"))
