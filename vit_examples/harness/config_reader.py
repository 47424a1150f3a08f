"""Configurations of a training program: sections of frozen dataclasses, from a YAML file and the command line.

A dataclass checks its section when it is built, so an error names the key, the value and what is allowed.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, get_type_hints

import yaml

from zeroresize.utils.value_checks import known_keys
from zeroresize.utils.yaml_values import load_yaml, read_yaml, yaml_mistake

_Config = TypeVar("_Config")


class Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage on every rank."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists all arguments)")


@dataclass(frozen=True)
class ConfigReader(Generic[_Config]):
    """How one program reads its configurations.

    Attributes:
        program: its module.
        description: what it does, for ``--help``.
        kind_of: tells the configuration's dataclass by what the file says. Fields that are dataclasses are sections,
            of which one with a method ``from_dict`` reads its own values.
        folder: of the files that come along.
        default: name of the file that is taken if none is asked for.
        flags: short forms of ``--set``: the keys that each sets, separated by spaces, and the type of its values.
        replaces: keys that decide which others of their section make sense: those are dropped where one of these is
            changed on the command line; an empty tuple stands for all others.
    """

    program: str
    description: str
    kind_of: Callable[[Mapping[str, Any]], type[_Config]]
    folder: Path
    default: str
    flags: Mapping[str, tuple[str, type]]
    replaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def argument_parser(self) -> argparse.ArgumentParser:
        """Return the command line; a wrong argument is a ValueError."""
        parser = Parser(prog=self.program, description=self.description, allow_abbrev=False)
        parser.add_argument("--config", default=self.default, help=f"{', '.join(self.names)}, or a YAML file")
        for name, (keys, kind) in self.flags.items():
            parser.add_argument(f"--{name}", type=kind, help=f"short for --set {keys}")
        parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change one value")
        parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
        parser.add_argument("--dry-run", action="store_true", help="check, print what each rank needs, train nothing")
        parser.add_argument("--ranks", type=int, help="ranks that --dry-run assumes")
        return parser

    def from_arguments(self, arguments: argparse.Namespace) -> _Config:
        """Return the configuration that parsed ``arguments`` ask for."""
        if arguments.ranks is not None and not arguments.dry_run:
            raise ValueError("--ranks goes with --dry-run; --nproc-per-node of the launcher says how many ranks train")
        given = [(keys, getattr(arguments, name)) for name, (keys, _) in self.flags.items()]
        flags = [(key, value) for keys, value in given if value is not None for key in keys.split()]
        return self._read(arguments.config, [*flags, *map(parse_override, arguments.set)])

    def load(self, name: str | Path, overrides: Sequence[str] = ()) -> _Config:
        """Read a YAML file, or one that comes along by its bare name, and apply ``section.key=value`` overrides."""
        return self._read(name, [parse_override(override) for override in overrides])

    def from_dict(self, document: Any) -> _Config:
        """Build from plain nested mappings; an unknown key is an error that names the nearest and lists all."""
        if not isinstance(document, Mapping):
            raise ValueError(f"expected sections, found {document!r}")
        return _built(self.kind_of(document), document, "section")

    def path_of(self, name: str | Path) -> Path:
        """Return the YAML file of that path, or else of that bare name among those that come along."""
        for path in (Path(name), self.folder / f"{name}.yaml"):
            if path.is_file():
                return path
        raise ValueError(f"--config {name}: no such file; by bare name there are {self.names}")

    @property
    def names(self) -> list[str]:
        """The bare names of the files that come along."""
        return sorted(path.stem for path in self.folder.glob("*.yaml"))

    def _read(self, name: str | Path, changes: Sequence[tuple[str, Any]]) -> _Config:
        document = read_yaml(self.path_of(name))
        if not isinstance(document, Mapping):
            raise ValueError(f"--config {name}: expected sections, found {document!r}")
        document = {key: dict(value) if isinstance(value, Mapping) else value for key, value in document.items()}
        for key, value in changes:
            self._change(document, key, value)
        return self.from_dict({key: value for key, value in document.items() if value is not None})

    def _change(self, document: dict[str, Any], key: str, value: Any) -> None:
        *rooms, leaf = key.split(".")
        place: Any = document
        for room in rooms:
            if place.get(room) is None:
                place[room] = {}
            place = place[room]
            if not isinstance(place, dict):
                raise ValueError(f"--set {key}: {room}={place!r} has no keys")
        others = self.replaces.get(key)
        if others is not None and value and value != place.get(leaf):
            for other in others or [name for name in place if name != leaf]:
                place.pop(other, None)
        place[leaf] = value


def plain(config: Any) -> dict[str, Any]:
    """Return the plain values of a configuration; a section with ``to_dict`` makes its own."""
    values = dataclasses.asdict(config)
    sections = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    return values | {name: section.to_dict() for name, section in sections.items() if hasattr(section, "to_dict")}


def parse_override(override: str) -> tuple[str, Any]:
    """Return the key and the value of ``section.key=value``."""
    key, equals, text = override.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise ValueError(f"--set {override}: expected section.key=value, such as training.lr=0.001")
    try:
        return key.strip(), load_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {override}: the value cannot be read as YAML: {yaml_mistake(error)}") from error


def _built(kind: Any, values: Any, what: str) -> Any:
    names = [one.name for one in dataclasses.fields(kind)]
    hints, values = get_type_hints(kind), dict(known_keys(what, values, names))
    for name, value in values.items():
        section = hints[name]
        if hasattr(section, "from_dict"):
            values[name] = _read_by_itself(section, name, value)
        elif dataclasses.is_dataclass(section) and not isinstance(value, section):
            values[name] = _built(section, value, f"{name} key")
    return kind(**values)


def _read_by_itself(section: Any, name: str, value: Any) -> Any:
    try:
        return section.from_dict(value)
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith((name, "unknown")) else f"{name}.{error}") from error
