"""YAML as people mean it: ``off`` is a string and ``1e-3`` a number, which YAML 1.1 reads the other way round.

Nothing in what is read runs code, and what cannot be read is refused, with its line where there is one.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

_BOOL, _FLOAT, _INT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float", "tag:yaml.org,2002:int"
_TIMESTAMP, _MERGE = "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:merge"
_PREFIX = re.compile("[-+]?0[box]", re.I)


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, and tells of what is no value with its line."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first: dict[Any, yaml.Node] = {}
        for key_node, _ in node.value:
            key = None if key_node.tag == _MERGE else self.construct_object(key_node, deep=True)
            if key is not None and isinstance(key, Hashable) and first.setdefault(key, key_node) is not key_node:
                line = first[key].start_mark.line + 1
                raise ConstructorError(None, None, f"the key {key!r} is in line {line} already", key_node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ConstructorError(None, None, f"no value of {node.tag}: {error}", node.start_mark) from error

    def construct_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node)).replace("_", "")
        return int(text, 0 if _PREFIX.match(text) else 10)


# What is not listed is a string: also dates, and 1:30.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in (_BOOL, _FLOAT, _INT, _TIMESTAMP)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("^(true|false)$", re.I), list("tTfF"))
_Loader.add_implicit_resolver(
    _INT, re.compile(r"^[-+]?([0-9][0-9_]*|0b[01]+|0o[0-7]+|0x[0-9a-f]+)$", re.I), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"^[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|nan)$", re.I),
    list("-+0123456789."),
)
_Loader.add_constructor(_INT, _Loader.construct_int)


def load_yaml(text: str | bytes) -> Any:
    """Return the value of a YAML document; bytes are UTF-8, or UTF-16 with a byte order mark."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("nested too deep") from error


def read_yaml(path: str | Path) -> Any:
    """Return the value of a YAML file."""
    try:
        return load_yaml(Path(path).read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: cannot be read as YAML: {yaml_mistake(error)}") from error


def yaml_mistake(error: yaml.YAMLError) -> str:
    """Return what is wrong, and where if that is known, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark, words = error.problem_mark, (error.context, error.problem)
        return f"line {mark.line + 1}, column {mark.column + 1}: {', '.join(word for word in words if word)}"
    return " ".join(str(error).split())
