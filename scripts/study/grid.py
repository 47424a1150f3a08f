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

from vit_examples.config import READER, load_config
from vit_examples.harness.checkpoints import done_at, newest
from vit_examples.harness.config_reader import parse_override
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import without_effect
from zeroresize.config.paper import dotted
from zeroresize.utils.files import read_json_lines
from zeroresize.utils.value_checks import at_least, known_keys
from zeroresize.utils.yaml_values import read_yaml

#: What the study itself sets, of every run.
_STUDY_KEYS = ("training.seed", "balance.seed", "output.folder")
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
    def key(self) -> tuple[str, str]:
        return self.name, str(self.seed)

    @property
    def settings_file(self) -> Path:
        return self.folder / "settings.yaml"

    @property
    def settings_there(self) -> str | None:
        """Those of the run in its folder; None where there is none."""
        return self.settings_file.read_text(encoding="utf-8") if self.settings_file.is_file() else None

    @property
    def checkpoint(self) -> Path | None:
        """The newest that is complete."""
        return newest(self.folder / "checkpoints")

    @property
    def can_go_on(self) -> bool:
        """Whether there is a checkpoint of a run that has epochs left."""
        return self.checkpoint is not None and done_at(self.checkpoint)["epoch"] < self.epochs

    def row(self) -> dict[str, Any] | None:
        """One flat row with the commit, versions and settings that it ran with, if the run is finished.

        Raises:
            ValueError: if ``summary.json`` is of something else than a run.
        """
        try:
            summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # there is none, or no whole one
            return None
        if not (isinstance(summary, Mapping) and isinstance(summary.get("versions"), Mapping)):
            raise ValueError(f"{self.folder}/summary.json: not of a run: delete that folder and its cell runs again")
        plain = {key: value for key, value in summary.items() if not isinstance(value, Mapping)}
        versions = {f"version_{name}": version for name, version in summary["versions"].items()}
        epochs = [line for line in read_json_lines(self.folder / "metrics.jsonl") if line["kind"] == "epoch"]
        by_epoch = {"accuracy_by_epoch": " ".join(f"{line['test_accuracy']:g}" for line in epochs)}
        return {"cell": self.name, "seed": self.seed, **plain, **by_epoch, **versions, "settings": self.settings_there}


@dataclass(frozen=True)
class Study:
    """A grid file, read and checked."""

    name: str
    config: str
    cells: tuple[Cell, ...]


def read_study(path: Path, output: Path, *, changes: Sequence[str] = ()) -> Study:
    """Read a grid; every cell's configuration is checked before any runs.

    Args:
        output: every cell gets a folder in there, in one that is named after the grid.
        changes: ``section.key=value``, which every cell takes instead of its own.

    Raises:
        ValueError: naming the file and the key or cell that is wrong, or two cells that would have one folder.
    """
    document = _read_grid(path)
    grid_cells = document["cells"]
    if isinstance(grid_cells, str):
        grid_cells = _read_grid(path.with_name(grid_cells))["cells"]
    if not isinstance(grid_cells, Mapping) or not all(isinstance(name, str) for name in grid_cells):
        raise ValueError(f"{path}: 'cells' must map names to overrides, or name a grid; got {grid_cells!r}")
    config, changed = document["config"], dict(map(parse_override, changes))
    shared = {**document.get("shared", {}), **changed}
    idle = set(shared)
    cells: dict[Path, Cell] = {}
    for seed in document.get("seeds", [0]):
        for name, of_cell in grid_cells.items():
            folder = output / path.stem / slug(name) / f"seed{seed}"
            of_cell = dict(of_cell or {})
            num_ranks = of_cell.pop("ranks", document.get("ranks", 2))
            settings = {**shared, **of_cell, **changed}
            if taken := [key for key in _STUDY_KEYS if key in settings]:
                raise ValueError(f"{path}, cell {name!r}: {taken} are set by the study itself, by 'seeds' and --output")
            values = {**settings, **dict(zip(_STUDY_KEYS, (seed, seed, str(folder)), strict=True))}
            idle_here = _without_effect(config, values) & (shared.keys() - of_cell.keys())
            idle &= idle_here
            overrides = tuple(f"{key}={as_yaml(value)}" for key, value in values.items() if key not in idle_here)
            try:
                at_least("ranks", num_ranks, 1)
                run = load_config(config, overrides)
                run.validate_group_size(num_ranks)
            except ValueError as error:
                raise ValueError(f"{path}, cell {name!r}: {error}") from error
            if folder in cells:
                raise ValueError(f"{path}: cells {cells[folder].name!r} and {name!r} would both run in {folder}")
            in_one_line = as_yaml({"config": config, "ranks": num_ranks, **settings})
            cells[folder] = Cell(name, seed, in_one_line, overrides, num_ranks, run.training.epochs, folder)
    if idle:
        raise ValueError(f"{path}: {sorted(idle)} of 'shared' or --set have no effect in the mode of any cell")
    return Study(path.stem, config, tuple(cells.values()))


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


def as_yaml(value: Any) -> str:
    """On one line; unlike JSON it keeps keys that are numbers."""
    return yaml.safe_dump(value, default_flow_style=True, width=2**16).removesuffix("...\n").strip()


def slug(name: str) -> str:
    """A cell's name as a folder's, within the study's: letters of any alphabet stay."""
    return re.sub(r"[^\w.=-]+", "_", name.replace("/", "-")).lstrip(".") or "_"
