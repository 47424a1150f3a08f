"""A run's configuration from a YAML file and the command line.

``--config`` names a file of ``configs/`` or a path; ``--set section.key=value`` and the common flags change it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from vit_examples.config import HOSTS, DataConfig, ModelConfig, OutputConfig, RunConfig, StragglerConfig, TrainingConfig
from zeroresize.config import BalanceConfig
from zeroresize.config.balance import DEFAULTS, known_balance_keys
from zeroresize.config.keys import MODES
from zeroresize.config.paper import ROOM, dotted, nested
from zeroresize.utils.value_checks import known_keys
from zeroresize.utils.yaml_values import load_yaml, read_yaml, yaml_mistake

CONFIG_FOLDER = Path(__file__).parent / "configs"
SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "straggler": StragglerConfig,
    "balance": BalanceConfig,
    "output": OutputConfig,
}
#: Common flags and the key that each sets.
FLAGS = {
    "host": "host",
    "mode": "balance.mode",
    "epochs": "training.epochs",
    "data": "data.source",
    "output": "output.folder",
    "seed": "training.seed",
}
_SET_HELP = (
    f"change one value, such as training.lr=0.001; may be repeated. Sections: {', '.join(SECTIONS)}. Their keys are "
    "listed in vit_examples/config.py, those of balance in zeroresize/config/balance.py and paper.py"
)


class Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage on every rank."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists all arguments)")


def argument_parser() -> argparse.ArgumentParser:
    """The command line of ``vit_examples.train``; a wrong argument is a ValueError."""
    parser = Parser(
        prog="vit_examples.train",
        description="Train a vision transformer with balanced tensor parallelism.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", default="demo", help=f"{', '.join(available_configs())}, or a YAML file (demo)")
    parser.add_argument("--host", choices=HOSTS, help="what shards the model")
    parser.add_argument("--mode", help=f"balance.mode: one of {', '.join(MODES)}")
    parser.add_argument("--epochs", type=int, help="training.epochs")
    parser.add_argument("--data", help="data.source: mnist5k, a folder of parquet files or a data set of the hub")
    parser.add_argument("--output", help="output.folder")
    parser.add_argument("--seed", type=int, help="training.seed and balance.seed")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=_SET_HELP)
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="check, print memory per rank, train nothing")
    parser.add_argument("--ranks", type=int, help="tensor-parallel ranks that --dry-run assumes (2)")
    return parser


def config_from_arguments(arguments: argparse.Namespace) -> RunConfig:
    """The configuration that parsed ``arguments`` ask for.

    Raises:
        ValueError: naming the key or file that is wrong, and what is allowed.
    """
    if arguments.ranks is not None and not arguments.dry_run:
        raise ValueError("--ranks goes with --dry-run; --nproc-per-node of the launcher says how many ranks train")
    flags = [(key, getattr(arguments, flag)) for flag, key in FLAGS.items() if getattr(arguments, flag) is not None]
    if arguments.seed is not None:
        flags.append(("balance.seed", arguments.seed))
    return _config(arguments.config, [*flags, *map(parse_override, arguments.set)])


def load_config(name: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, or one of ``configs/`` by its bare name, and apply ``section.key=value`` overrides.

    Raises:
        ValueError: if there is no such file, or a key or value is wrong.
    """
    return _config(name, [parse_override(override) for override in overrides])


def _config(name: str | Path, changes: Sequence[tuple[str, Any]]) -> RunConfig:
    path = config_path(name)
    try:
        document = read_yaml(path)
    except OSError as error:
        raise ValueError(f"--config {name}: {error.strerror}") from error
    try:
        changed = document
        for key, value in changes:
            changed = _with_change(changed, key, value)
        return config_from_dict(changed)
    except ValueError as error:
        if str(error) == _mistake_in(document):
            raise ValueError(f"{path.name}: {error}") from error
        raise


def config_path(name: str | Path, folder: Path = CONFIG_FOLDER) -> Path:
    """The YAML file of that path, or else of that bare name in ``folder``.

    Raises:
        ValueError: if there is neither.
    """
    for path in (Path(name), folder / f"{name}.yaml"):
        if os.path.isfile(path):  # unlike Path.is_file, also answers for a name that is too long
            return path
    what = "is a folder, not a file" if os.path.isdir(name) else "no such file"
    raise ValueError(f"--config {name}: {what}; by bare name there are {available_configs(folder)}")


def config_from_dict(document: Any) -> RunConfig:
    """Build from plain nested mappings; unknown keys are an error that lists those that exist."""
    values = dict(known_keys("section", document, _fields(RunConfig)))
    for name in SECTIONS:
        if name in values:
            values[name] = _section_from(name, _known_keys(name, values[name]))
    return RunConfig(**values)


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain values that ``config_from_dict`` reads back."""
    return {**dataclasses.asdict(config), "balance": config.balance.to_dict()}


def available_configs(folder: Path = CONFIG_FOLDER) -> list[str]:
    """Bare names of the files in ``configs/``."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _mistake_in(document: Any) -> str | None:
    """What is wrong with a file as it stands, without anything from the command line."""
    try:
        config_from_dict(document)
    except ValueError as error:
        return str(error)
    return None


def _section_from(name: str, values: Mapping[str, Any]) -> Any:
    if name != "balance":
        return SECTIONS[name](**values)
    try:
        return BalanceConfig(**values)
    except ValueError as error:  # the package's own messages begin with the bare key
        raise ValueError(f"balance.{error}") from error


def _fields(section: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(section)]


def _known_keys(section: str, values: Any) -> Mapping[str, Any]:
    """Check that ``values`` is a mapping of keys of ``section``."""
    if section == "balance":
        return known_balance_keys(values)
    return known_keys(f"{section} key", values, _fields(SECTIONS[section]))


def parse_override(override: str) -> tuple[str, Any]:
    """The key and the value of ``section.key=value``.

    Raises:
        ValueError: if it is not of that form, or the value is not YAML.
    """
    key, equals, text = override.partition("=")
    section, dot, leaf = key.strip().partition(".")
    if not equals or not section or (dot and not leaf):
        raise ValueError(f"--set {override}: expected section.key=value, such as training.lr=0.001")
    try:
        return key.strip(), load_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {override}: the value cannot be read as YAML: {yaml_mistake(error)}") from error


def _with_change(document: Any, key: str, value: Any) -> dict[str, Any]:
    """``document`` with one value changed; a section that is empty is as one that is missing.

    Raises:
        ValueError: for what is no mapping where one is needed.
    """
    section, dot, leaf = key.partition(".")
    document = dict(known_keys("section", document, _fields(RunConfig)))
    if not dot:
        meant = [f"{name}.{key}" for name in SECTIONS if key in _fields(SECTIONS[name])]
        meant += [f"balance.{name}" for name in DEFAULTS if name == f"{ROOM}.{key}"]
        if meant and key not in _fields(RunConfig):
            raise ValueError(f"--set {key}: name the section: {' or '.join(meant)}")
        return {**document, section: value}
    inner = document.get(section)
    if inner is None:
        inner = {}
    elif section in SECTIONS:
        _known_keys(section, inner)
    inner = {**inner} if isinstance(inner, Mapping) else {}
    if section == "balance":
        return {**document, section: nested({**dotted(inner), leaf: value})}
    return {**document, section: {**inner, leaf: value}}
