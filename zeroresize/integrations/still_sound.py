"""Asked before units move: whether a segment is still what it was found to be, as nobody says so when it is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from zeroresize.integrations.adapter_layers import why_adapted_since
from zeroresize.integrations.changed_modules import why_changed
from zeroresize.integrations.graph_reading import NotProven, TracedSegment
from zeroresize.integrations.traced_segments import TracedModule

#: While segments are asked together: what was traced for them.
_shared: ContextVar[dict[nn.Module, TracedModule] | None] = ContextVar("_shared", default=None)


@contextmanager
def asked_together() -> Iterator[None]:
    """Trace a module that holds several segments once while the block lasts, in which nothing may change."""
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


@dataclass(frozen=True)
class StillSound:
    """Looks for a segment's layers, and forwards and hooks in them, then asks on; called, it tells why units must stay.

    Attributes:
        model: that the layers were found in.
        layers: of the segment, by name.
        why_even: what an adapter, a user or a proof has to say beside it.
    """

    model: nn.Module
    layers: Mapping[str, Any]
    why_even: Callable[[], str | None] | None = None

    def __call__(self) -> str | None:
        for name, layer in self.layers.items():
            if (changed := why_adapted_since(self.model, name, layer) or why_changed(layer)) is not None:
                return f"{name} {changed}"
        return None if self.why_even is None else self.why_even()


@dataclass(frozen=True)
class TracedAgain:
    """Traces the module that holds a segment as ``convert`` did; called, it tells what is not as it was.

    Attributes:
        model: that the segment was found in.
        holder, name: the module whose forward proves the segment, and its name in the model.
        row: the layer that ends the segment.
        reading: what tracing read at convert.
    """

    model: nn.Module
    holder: nn.Module
    name: str
    row: Any
    reading: TracedSegment

    def __call__(self) -> str | None:
        holder_name = f"{self.name or 'the model'} ({type(self.holder).__name__})"
        if not _are_only_in(self.holder, (*self.reading.columns, self.row), self.model):
            return f"{holder_name} was changed after convert: it, or a layer in it, is now elsewhere in the model"
        try:
            now = _traced(self.holder, self.name).segment_of(self.row)
        except NotProven as error:
            return f"it was changed after convert: {error}"
        if now.columns != self.reading.columns:
            return f"{holder_name} was changed after convert: other layers come before"
        if len(now.dropouts) > len(self.reading.dropouts) or now.has_other_dropout > self.reading.has_other_dropout:
            return f"{holder_name} was changed after convert: it has dropout that it did not have"
        return None


def _are_only_in(holder: nn.Module, layers: Sequence[Any], model: nn.Module) -> bool:
    """Tell whether the model has the holder, and every way from the model to the layers passes it."""
    seen: set[nn.Module] = set()
    todo = [model]
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += [] if module is holder else module.children()
    return holder in seen and seen.isdisjoint(layers)


def _traced(holder: nn.Module, name: str) -> TracedModule:
    module = TracedModule(holder, name)
    known = _shared.get()
    return module if known is None else known.setdefault(holder, module)
