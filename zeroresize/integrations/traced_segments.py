"""Segments of plain torch modules, proven by tracing the forward that holds their layers with ``torch.fx``.

:mod:`~zeroresize.integrations.forward_graphs` traces a forward under everything that it may ask for, each time twice,
and :mod:`~zeroresize.integrations.graph_reading` reads a segment in each graph; all must tell the same. Before units
move, that is done again, each time once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from zeroresize.integrations.forward_graphs import forward_graphs, place_of
from zeroresize.integrations.graph_reading import FromOutside, NotProven, TracedSegment, read_segment


class _NotTraced(NotProven):
    """Raised where ``torch.fx`` does not understand a forward."""


@dataclass
class TracedModule:
    """Traces a module's forward under everything that it may ask for, once for all segments in it.

    Attributes:
        module: is traced.
        name: is that of the module in the model.
        num_times: is how often it is traced under each circumstance.
    """

    module: nn.Module
    name: str
    num_times: int = 2
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
                readings = [read_segment(graph, self.module, row) for graph in self._traced(holding)]
                if any(one.columns != readings[0].columns for one in readings):
                    raise NotProven(f"the layers before it depend on how {self._description} is called")
                dropouts = dict.fromkeys(module for one in readings for module in one.dropouts)
                has_other_dropout = any(one.has_other_dropout for one in readings)
                return TracedSegment(readings[0].columns, tuple(dropouts), has_other_dropout)
            except _NotTraced as error:
                failures.append(error)
            except NotProven as error:  # seen whole, it shows no more with less of it
                failures.append(error)
                break
        if any(isinstance(one, FromOutside) for one in failures):
            raise FromOutside("its input is no output of a column-parallel layer")
        raise next((one for one in failures if not isinstance(one, _NotTraced)), failures[0])

    @property
    def _description(self) -> str:
        return f"{self.name or 'the model'} ({type(self.module).__name__})"

    def _traced(self, holding: nn.Module | None) -> list[fx.Graph]:
        known = self._graphs.get(id(holding))
        if known is None:
            try:
                known = list(forward_graphs(self.module, holding, self.num_times))
            except Exception as error:  # whatever a user's forward makes of a proxy
                lines = str(error).strip().splitlines()
                message = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
                message += place_of(error)
                known = _NotTraced(f"torch.fx cannot trace {self._description}: {message}")
            self._graphs[id(holding)] = known
        if isinstance(known, NotProven):
            raise known
        return known
