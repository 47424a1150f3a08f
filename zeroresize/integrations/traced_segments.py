"""Segments of plain torch modules, proven from the forward that holds their layers.

:mod:`~zeroresize.integrations.forward_graphs` traces it, :mod:`~zeroresize.integrations.graph_reading` reads a segment
in each graph, where all operations between the layers must be on a list, and
:mod:`~zeroresize.integrations.unit_proof` proves by numbers what a graph does not show. Before units move, that is done
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from zeroresize.integrations.forward_graphs import ForwardTracer, forward_traces, place_of
from zeroresize.integrations.graph_reading import FromOutside, NotProven, TracedSegment, read_segment
from zeroresize.integrations.unit_proof import require_unmixed_in_trace


class _NotTraced(NotProven):
    """Raised where ``torch.fx`` does not understand a forward."""


@dataclass
class TracedModule:
    """Traces a module's forward, once for all segments in it.

    Attributes:
        module: is traced.
        name: is that of the module in the model.
    """

    module: nn.Module
    name: str
    _graphs: dict[int, list[fx.Graph] | NotProven] = field(default_factory=dict)

    def segment_of(self, row: Any) -> TracedSegment:
        """Prove which segment the row-parallel layer ``row`` ends.

        Raises:
            FromOutside: if a larger module may show more.
            NotProven: with the reason.
        """
        failures: list[NotProven] = []
        for holding in (None, row):  # what cannot be traced may be another submodule's forward
            try:
                return self._read(row, holding)
            except _NotTraced as error:
                failures.append(error)
            except NotProven as error:  # seen whole, it shows no more with less of it
                failures.append(error)
                break
        if any(isinstance(one, FromOutside) for one in failures):
            raise FromOutside("its input is no output of a column-parallel layer")
        raise next((one for one in failures if not isinstance(one, _NotTraced)), failures[0])

    def _read(self, row: Any, holding: nn.Module | None) -> TracedSegment:
        readings = [read_segment(graph, self.module, row) for graph in self._traced(holding)]
        columns = readings[0].columns
        if any(reading.columns != columns for reading in readings):
            raise NotProven(f"the layers before it depend on how {self._description} is called")
        rows = {layer: (1,) * num_blocks for layer, num_blocks in columns.items()}
        try:
            require_unmixed_in_trace(self.module, holding, rows, row)
        except Exception as error:  # whatever a user's forward makes of the numbers
            raise NotProven(f"{self._description}, computed with numbers: {_line_of(error)}") from error
        dropouts = dict.fromkeys(module for reading in readings for module in reading.dropouts)
        return TracedSegment(columns, tuple(dropouts), any(reading.has_other_dropout for reading in readings))

    @property
    def _description(self) -> str:
        return f"{self.name or 'the model'} ({type(self.module).__name__})"

    def _traced(self, holding: nn.Module | None) -> list[fx.Graph]:
        known = self._graphs.get(id(holding))
        if known is None:
            try:
                known = [tracer.graph for tracer in forward_traces(self.module, lambda: ForwardTracer(holding))]
            except Exception as error:  # whatever a user's forward makes of a proxy
                known = _NotTraced(f"torch.fx cannot trace {self._description}: {_line_of(error)}")
            self._graphs[id(holding)] = known
        if isinstance(known, NotProven):
            raise known
        return known


def _line_of(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return message + place_of(error)


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
            now = TracedModule(self.holder, self.name).segment_of(self.row)
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
