"""Configurations of a training program, from a YAML file and the command line: sections of frozen dataclasses.

``--config`` names a file of the program's folder or a path; ``--set section.key=value`` and the common flags change it.
OmegaConf holds the file and the changes on top of it. A dataclass checks its section when it is built, so that an error
names the key, the value and what is allowed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zeroresize.utils.value_checks import known_keys
from zeroresize.utils.yaml_values import load_yaml, read_yaml, yaml_mistake

_Config = TypeVar("_Config")


class Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage on every rank."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists all arguments)")


@dataclass(frozen=True)
class Flag:
    """A short form of ``--set``.

    Attributes:
        keys: that it sets, separated by spaces.
        of: the type of its values.
        choices: those that are allowed; None where the section checks them.
    """

    keys: str
    help: str
    of: type = str
    choices: Sequence[str] | None = None


@dataclass(frozen=True)
class ConfigReader(Generic[_Config]):
    """How one program reads its configurations.

    Attributes:
        program: its module.
        description: what it does, for ``--help``.
        kind: of the configuration, made of its sections by their names, and perhaps of single values.
        sections: a dataclass of each.
        folder: of the files that come along.
        default: name of the one that is taken if none is asked for.
        default_ranks: that ``--dry-run`` assumes.
        keys_are_in: where the keys of sections are listed.
        flags: short forms, by their names.
        read_section: of sections that are read in another way than by their dataclass's fields.
        inner_keys: keys within a section that stand within another key of it, such as ``paper.alpha``.
        deciding: keys, with their defaults, of whose values it depends what else their section has: if one is changed,
            the rest of its section does not stay.
        instead_of: keys beside which others of their section make no sense: if one is set on the command line, those
            that the file sets do not stay.
    """

    program: str
    description: str
    kind: Callable[..., _Config]
    sections: Mapping[str, Any]
    folder: Path
    default: str
    default_ranks: int
    keys_are_in: str
    flags: Mapping[str, Flag]
    read_section: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    inner_keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    deciding: Mapping[str, str] = field(default_factory=dict)
    instead_of: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def argument_parser(self) -> argparse.ArgumentParser:
        """Return the command line; a wrong argument is a ValueError."""
        parser = Parser(prog=self.program, description=self.description, allow_abbrev=False)
        names = ", ".join(self.available())
        parser.add_argument("--config", default=self.default, help=f"{names}, or a YAML file ({self.default})")
        for name, flag in self.flags.items():
            parser.add_argument(f"--{name}", type=flag.of, choices=flag.choices, help=flag.help)
        help_of_set = (
            "change one value, such as training.lr=0.001; may be repeated. "
            f"Sections: {', '.join(self.sections)}. Their keys are listed in {self.keys_are_in}"
        )
        parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=help_of_set)
        parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
        parser.add_argument("--dry-run", action="store_true", help="check, print what each rank needs, train nothing")
        parser.add_argument("--ranks", type=int, help=f"ranks that --dry-run assumes ({self.default_ranks})")
        return parser

    def from_arguments(self, arguments: argparse.Namespace) -> _Config:
        """Return the configuration that parsed ``arguments`` ask for.

        Raises:
            ValueError: naming the key or file that is wrong, and what is allowed.
        """
        if arguments.ranks is not None and not arguments.dry_run:
            raise ValueError("--ranks goes with --dry-run; --nproc-per-node of the launcher says how many ranks train")
        given = [(flag.keys, getattr(arguments, name)) for name, flag in self.flags.items()]
        flags = [(key, value) for keys, value in given if value is not None for key in keys.split()]
        return self._read(arguments.config, [*flags, *map(parse_override, arguments.set)])

    def load(self, name: str | Path, overrides: Sequence[str] = ()) -> _Config:
        """Read a YAML file, or one that comes along by its bare name, and apply ``section.key=value`` overrides.

        Raises:
            ValueError: if there is no such file, or a key or value is wrong.
        """
        return self._read(name, [parse_override(override) for override in overrides])

    def from_dict(self, document: Any) -> _Config:
        """Build from plain nested mappings; unknown keys are an error that names the nearest and lists all."""
        values = dict(known_keys("section", document, self._names()))
        for name in self.sections:
            if name in values:
                values[name] = self._section(name, values[name])
        return self.kind(**values)

    def to_dict(self, config: _Config) -> dict[str, Any]:
        """Return plain values that :meth:`from_dict` reads back; a section with ``to_dict`` makes its own."""
        sections: dict[str, Any] = {name: getattr(config, name) for name in self.sections}
        plain = {name: section.to_dict() for name, section in sections.items() if hasattr(section, "to_dict")}
        return {**dataclasses.asdict(config), **plain}  # type: ignore[call-overload]

    def available(self) -> list[str]:
        """Return the bare names of the files that come along."""
        return sorted(path.stem for path in self.folder.glob("*.yaml"))

    def path_of(self, name: str | Path) -> Path:
        """Return the YAML file of that path, or else of that bare name among those that come along.

        Raises:
            ValueError: if there is neither.
        """
        for path in (Path(name), self.folder / f"{name}.yaml"):
            if os.path.isfile(path):  # unlike Path.is_file, also answers for a name that is too long
                return path
        what = "is a folder, not a file" if os.path.isdir(name) else "no such file"
        raise ValueError(f"--config {name}: {what}; by bare name there are {self.available()}")

    def _read(self, name: str | Path, changes: Sequence[tuple[str, Any]]) -> _Config:
        path = self.path_of(name)
        try:
            document = read_yaml(path)
        except OSError as error:
            raise ValueError(f"--config {name}: {error.strerror}") from error
        try:
            return self.from_dict(self._changed(document, changes))
        except ValueError as error:
            if str(error) == self._mistake_in(document):
                raise ValueError(f"{path.name}: {error}") from error
            raise

    def _mistake_in(self, document: Any) -> str | None:
        """Return what is wrong with a file as it stands, without anything from the command line."""
        try:
            self.from_dict(self._changed(document, []))
        except ValueError as error:
            return str(error)
        return None

    def _changed(self, document: Any, changes: Sequence[tuple[str, Any]]) -> Any:
        """Return ``document`` with the changes; a section of it that is empty is as one that is missing.

        Raises:
            ValueError: for what is no mapping where one is needed, or cannot be held.
        """
        values = known_keys("section", document, self._names())
        given = {key for key, _ in changes}
        try:
            config = OmegaConf.create({name: value for name, value in values.items() if value is not None})
            for key, value in changes:
                self._change(config, key, value)
                for other in self.instead_of.get(key, ()) if value else ():
                    section, _, leaf = other.partition(".")
                    if other not in given:
                        config[section].pop(leaf, None)
            return OmegaConf.to_container(config, resolve=False)
        except OmegaConfBaseException as error:
            reason, *_ = str(error).splitlines()
            raise ValueError(f"{error.full_key or 'the configuration'}: {reason}") from error

    def _change(self, config: DictConfig, key: str, value: Any) -> None:
        section, dot, leaf = key.partition(".")
        if not dot and key not in self._names():
            meant = [f"{name}.{own}" for name in self.sections for own in self._keys(name) if _ends_with(own, key)]
            if meant:
                raise ValueError(f"--set {key}: name the section: {' or '.join(meant)}")
        known_keys("section", {section: None}, self._names())
        if not dot:
            config[section] = value
            return
        if config.get(section) is None:
            config[section] = {}
        before, room = config[section], leaf.partition(".")[0]
        if not isinstance(before, Mapping):  # an error of the file; of a single value, which has no keys
            config[section] = before if section in self.sections else {leaf: value}
        elif key in self.deciding and value != before.get(leaf, self.deciding[key]):
            config[section] = {leaf: value}
        elif "." in leaf and any(inner.startswith(f"{room}.") for inner in self.inner_keys.get(section, ())):
            if not isinstance(before.get(room), Mapping):
                before[room] = {}
            OmegaConf.update(config, key, value, merge=False, force_add=True)
        else:
            before[leaf] = value

    def _section(self, name: str, values: Any) -> Any:
        if name in self.read_section:
            return self.read_section[name](values)
        section = self.sections[name]
        return section(**known_keys(f"{name} key", values, fields_of(section)))

    def _names(self) -> list[str]:
        return fields_of(self.kind)

    def _keys(self, section: str) -> list[str]:
        return [*fields_of(self.sections[section]), *self.inner_keys.get(section, ())]


def fields_of(section: Any) -> list[str]:
    """Return the keys of a section."""
    return [one.name for one in dataclasses.fields(section)]


def parse_override(override: str) -> tuple[str, Any]:
    """Return the key and the value of ``section.key=value``.

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


def _ends_with(key: str, last: str) -> bool:
    return key.rpartition(".")[2] == last
