"""What a module is called in the model that holds it, for errors of code that is given the module alone."""

from __future__ import annotations

import gc

from torch import nn


def qualified_name(module: nn.Module) -> str | None:
    """Return the module's qualified name in the largest model that holds it; None where no module holds it.

    It looks through all objects of the process, which takes a part of a second: for errors only.
    """
    holders: dict[int, tuple[nn.Module, str]] = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), nn.Module):
            for name, child in (vars(candidate).get("_modules") or {}).items():
                holders.setdefault(id(child), (candidate, name))
    names: list[str] = []
    seen: set[int] = set()
    while id(module) in holders and id(module) not in seen:
        seen.add(id(module))
        module, name = holders[id(module)]
        names.append(name)
    return ".".join(reversed(names)) if names else None
