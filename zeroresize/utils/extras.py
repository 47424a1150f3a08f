"""Packages that are not needed but for what an extra of this package is for."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingExtra(ModuleNotFoundError):
    """Say in one line what to install."""


def need(module: str, extra: str) -> ModuleType:
    """Return a module of an extra of this package, or that needs it; the error says how to install what lacks."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise MissingExtra(f"needs the package {package}: pip install 'zeroresize[{extra}]'") from error
