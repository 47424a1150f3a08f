"""YAML as people mean it: ``off`` is a string and ``1e-3`` a number, which YAML 1.1 reads the other way round."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    pass


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in (_BOOL, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("^(true|false)$", re.I), list("tTfF"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"^[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|nan)$", re.I),
    list("-+0123456789."),
)


def load_yaml(text: str) -> Any:
    """The value of a YAML document.

    Raises:
        yaml.YAMLError: if ``text`` is none.
    """
    return yaml.load(text, _Loader)


def read_yaml(path: str | Path) -> Any:
    """The value of a YAML file.

    Raises:
        ValueError: naming the file, if it is not YAML.
        OSError: if it cannot be read.
    """
    try:
        return load_yaml(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}") from error
