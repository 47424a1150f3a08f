"""Configurations of a training program, from a YAML file and the command line: sections of frozen dataclasses.

``--config`` names a file of the program's folder or a path; ``--set section.key=value`` and the common flags change it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from vit_examples.config_file import Parser, config_path, parse_override
from vit_examples.config_file import available_configs as configs_in
from zeroresize.utils.value_checks import known_keys
from zeroresize.utils.yaml_values import read_yaml

_Config = TypeVar("_Config")


@dataclass(frozen=True)
class Flag:
    """A short form of ``--set``: ``key`` is the section's key that it sets, ``of`` its values' type."""

    key: str
    help: str
    of: type = str


@dataclass(frozen=True)
class ConfigReader(Generic[_Config]):
    """How one program reads its configurations.

    Attributes:
        kind: of the configuration, made of its sections by their names.
        sections: a dataclass of each.
        folder: of the files that come along.
        default: name of the one that is taken if none is asked for.
        flags: short forms, by their names.
        read_section: of sections that are read in another way than by their dataclass's fields.
        deciding: keys, with their defaults, of whose values it depends what else their section has: if one is changed,
            the rest of its section does not stay.
        instead_of: keys beside which others of their section make no sense: if one is set on the command line, those
            that the file sets do not stay.
    """

    kind: Callable[..., _Config]
    sections: Mapping[str, Any]
    folder: Path
    default: str
    flags: Mapping[str, Flag]
    read_section: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    deciding: Mapping[str, str] = field(default_factory=dict)
    instead_of: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def parser(self, program: str, description: str, default_ranks: int, where: str) -> argparse.ArgumentParser:
        """The command line; a wrong argument is a ValueError.

        Args:
            where: the keys of sections are described.
        """
        parser = Parser(prog=program, description=description, allow_abbrev=False)
        names = ", ".join(self.available())
        parser.add_argument("--config", default=self.default, help=f"{names}, or a YAML file ({self.default})")
        for name, flag in self.flags.items():
            parser.add_argument(f"--{name}", type=flag.of, help=flag.help)
        sections = f"Sections: {', '.join(self.sections)}. Their keys are listed in {where}"
        told = f"change one value, such as training.lr=0.001; may be repeated. {sections}"
        parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=told)
        parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
        parser.add_argument("--dry-run", action="store_true", help="check, print layers and memory, no training")
        parser.add_argument("--ranks", type=int, help=f"ranks that --dry-run assumes ({default_ranks})")
        return parser

    def from_arguments(self, arguments: argparse.Namespace) -> _Config:
        """The configuration that parsed ``arguments`` ask for.

        Raises:
            ValueError: naming the key or file that is wrong, and what is allowed.
        """
        if arguments.ranks is not None and not arguments.dry_run:
            raise ValueError("--ranks goes with --dry-run; --nproc-per-node of the launcher says how many ranks train")
        given = [(flag.key, getattr(arguments, name)) for name, flag in self.flags.items()]
        flags = [(key, value) for key, value in given if value is not None]
        return self._read(arguments.config, [*flags, *map(parse_override, arguments.set)])

    def load(self, name: str | Path, overrides: Sequence[str] = ()) -> _Config:
        """Read a YAML file, or one that comes along by its bare name, and apply ``section.key=value`` overrides.

        Raises:
            ValueError: if there is no such file, or a key or value is wrong.
        """
        return self._read(name, [parse_override(override) for override in overrides])

    def from_dict(self, document: Any) -> _Config:
        """Build from plain nested mappings; unknown keys are an error that names the nearest and lists all.

        A section that is empty is as one that is missing.
        """
        values = known_keys("section", document, list(self.sections))
        return self.kind(**{name: self._section(name, own) for name, own in values.items() if own is not None})

    def available(self) -> list[str]:
        """Bare names of the files that come along."""
        return configs_in(self.folder)

    def _read(self, name: str | Path, changes: Sequence[tuple[str, Any]]) -> _Config:
        path = config_path(name, self.folder)
        try:
            document = read_yaml(path)
        except OSError as error:
            raise ValueError(f"--config {name}: {error.strerror}") from error
        try:
            self.from_dict(document)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error
        given = {key for key, _ in changes}
        for key, value in changes:
            document = self._with_change(document, key, value)
            for other in self.instead_of.get(key, ()) if value else ():
                section, _, leaf = other.partition(".")
                if other not in given:
                    document[section].pop(leaf, None)
        return self.from_dict(document)

    def _section(self, name: str, values: Any) -> Any:
        if name in self.read_section:
            return self.read_section[name](values)
        section = self.sections[name]
        return section(**known_keys(f"{name} key", values, fields_of(section)))

    def _with_change(self, document: Any, key: str, value: Any) -> dict[str, Any]:
        """``document`` with one value changed."""
        section, dot, leaf = key.partition(".")
        document = dict(known_keys("section", document, list(self.sections)))
        if not dot:
            return {**document, section: value}
        known_keys("section", {section: None}, list(self.sections))
        inner = document.get(section) or {}
        if key in self.deciding and value != inner.get(leaf, self.deciding[key]):
            inner = {}
        return {**document, section: {**inner, leaf: value}}


def fields_of(section: Any) -> list[str]:
    """The keys of a section."""
    return [one.name for one in dataclasses.fields(section)]
