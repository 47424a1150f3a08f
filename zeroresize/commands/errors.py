"""What a command says instead of a traceback."""

from __future__ import annotations

import importlib
from types import ModuleType


class CommandError(Exception):
    """Say in one line what was given wrongly, where, and what is allowed."""


def need(module: str, extra: str) -> ModuleType:
    """Return a module of an extra of this package; where it is not installed the error says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise CommandError(f"needs the package {package}: pip install 'zeroresize[{extra}]'") from error
