"""find_segments(): which layers of a converted model form segments, so that units can be owned unevenly.

A segment is the column-parallel layers that read one replicated x, the row-parallel layer whose y is summed, and what
lies between, which must treat units independently of each other. That is known of a module's class
(:mod:`zeroresize.integrations.segment_registry`), proven by tracing (:mod:`~zeroresize.integrations.traced_segments`),
or the user's word.

``N`` output and ``K`` input features of a layer on this rank, ``U`` units of all ``R`` ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

import zeroresize.integrations.transformers_segments  # noqa: F401 - it registers what it knows
from zeroresize.comm.collectives import group_rank
from zeroresize.integrations.changed_modules import StillSound, why_adapted, why_changed
from zeroresize.integrations.graph_reading import FromOutside, NotProven
from zeroresize.integrations.named_segments import require_followed_tensors, require_follower, require_whole_heads
from zeroresize.integrations.packed_layers import REMEDY, described, require_right_parts
from zeroresize.integrations.segment_registry import StaysEven, is_registered, registered_segments
from zeroresize.integrations.traced_segments import TracedAgain, TracedModule
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.parts import checked_parts
from zeroresize.layers.segment import OwnedSegment, Segment, UnitTensor
from zeroresize.plan.ownership import OwnershipMap, neuron_quantum
from zeroresize.utils.torch_private import buffers_of, children_of, parameters_of

_SPLITS_ITSELF = "it takes the whole input and splits it evenly itself"
_TRY_IT = "zeroresize.check_segments(model, batch) shows whether a segment that is named moves soundly"
_NAME_IT = f"name it by zeroresize.Segment(column=[...], row=..., unit_size=...); {_TRY_IT}"


def find_segments(
    model: nn.Module, layers: Mapping[str, BalancedLinear], num_ranks: int, named: Sequence[Segment] = ()
) -> tuple[list[OwnedSegment], dict[str, str]]:
    """Find the segments of a model whose layers hold their even shares.

    Args:
        model: the module that names refer to, without a host's wrappers.
        layers: its converted layers by name, in the order of the model.
        num_ranks: R.
        named: segments that the user names. A layer in one of them is in no other one.

    Returns:
        (the segments in the order of the model, for every other layer the reason why it stays even).

    Raises:
        ValueError: for a packed layer that was split across its parts; for a named segment whose layers do not exist,
            are not converted, are of the wrong kind, do not fit each other's sizes, or are in another one, saying which
            and what is allowed.
    """
    search = _Search(model, layers, num_ranks)
    for segment in named:
        search.take_named(segment)
    search.take_registered()
    require_right_parts(model, layers, num_ranks, search.with_given_parts)
    search.take_traced()
    return search.result()


class _Search:
    def __init__(self, model: nn.Module, layers: Mapping[str, BalancedLinear], num_ranks: int) -> None:
        self._model, self._layers, self._num_ranks = model, layers, num_ranks
        self._order = {name: number for number, name in enumerate(layers)}
        self._modules = dict(model.named_modules())
        self._names: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), []).append(name)
        self._uses = Counter(id(one) for module in model.modules() for one in parameters_of(module).values())
        self._segments: list[OwnedSegment] = []
        self._owner: dict[str, OwnedSegment] = {}
        self._reasons: dict[str, str] = {}
        #: Layers of whose weights somebody says how they are packed on a rank.
        self.with_given_parts: set[str] = set()
        #: For a column-parallel layer, the row-parallel one that may have ended its segment.
        self._ends_at: dict[str, str] = {}

    def result(self) -> tuple[list[OwnedSegment], dict[str, str]]:
        segments = sorted(self._segments, key=lambda segment: self._order[segment.name])
        for name, layer in self._layers.items():
            if name not in self._owner and layer.why_even is not None:  # naming it would be refused
                self._reasons[name] = layer.why_even
            if name in self._owner or name in self._reasons:
                continue
            if (row := self._ends_at.get(name)) is not None and row in self._reasons:
                self._reasons[name] = f"no segment with {row}: {self._reasons[row]}"
            elif layer.is_column_parallel:
                self._reasons[name] = f"no row-parallel layer was found that reads what it returns: {_NAME_IT}"
            else:
                self._reasons[name] = f"its input is no output of a column-parallel layer: {_NAME_IT}"
        return segments, {name: self._reasons[name] for name in self._layers if name not in self._owner}

    def take_named(self, segment: Segment) -> None:
        try:
            columns = [self._named_layer(one, segment, is_column=True) for one in segment.column]
            row = self._named_layer(segment.row, segment, is_column=False)
            if not columns:
                raise StaysEven("it names no column-parallel layer")
            self._take(segment, columns, row)
        except StaysEven as error:
            raise ValueError(f"{self._described(segment)}: {error}. {_TRY_IT}") from None

    def take_registered(self) -> None:
        for name, module in self._modules.items():
            if not is_registered(module):
                continue
            inside = self._free(name)
            try:
                self._require_no_adapters(inside)
                for segment in registered_segments(module):
                    self._take_found(segment)
            except StaysEven as error:
                for layer_name in inside:
                    self._reasons.setdefault(layer_name, f"{type(module).__name__}: {error}")

    def take_traced(self) -> None:
        traced: dict[str, TracedModule] = {}
        for name, row in self._layers.items():
            if row.is_column_parallel or name in self._owner or name in self._reasons:
                continue
            if not reads_its_slice(row):
                self._reasons[name] = _SPLITS_ITSELF
                continue
            for holder in _ancestors(name):
                inside = [
                    layer_name for layer_name in self._free(holder) if self._layers[layer_name].is_column_parallel
                ]
                inside = [layer_name for layer_name in inside if layer_name not in self._reasons]
                if not inside:
                    continue
                module = traced.setdefault(holder, TracedModule(self._modules[holder], holder))
                try:
                    self._take_traced(module, name, row)
                except FromOutside as error:
                    self._reasons[name] = str(error)
                    continue
                except (NotProven, StaysEven) as error:
                    adapted = next(filter(None, (why_adapted(self._model, each) for each in (name, *inside))), None)
                    self._reasons[name] = adapted or f"{error}: {_NAME_IT}"
                    for layer_name in inside:
                        self._ends_at.setdefault(layer_name, name)
                break

    def _take_traced(self, module: TracedModule, name: str, row: BalancedLinear) -> None:
        traced = module.segment_of(row)
        columns, blocks = traced.columns, set(traced.columns.values())
        if len(blocks) > 1:
            raise NotProven("its column-parallel layers hold different numbers of blocks")
        for layer in (*columns, row):
            self._require_only_in(module, layer)
        layers: list[Any] = [*columns, row]
        segment = Segment(
            layers[:-1],
            layers[-1],
            parts=blocks.pop(),
            min_units=0,
            kind="neurons",
            dropouts=[(dropout, -1) for dropout in traced.dropouts],
            has_other_dropout=traced.has_other_dropout,
            why_even=TracedAgain(self._model, module.module, module.name, row, traced),
        )
        names = sorted(map(self._name_of, columns), key=self._order.__getitem__)
        self._reasons.pop(name, None)
        self._take(segment, names, name, is_proven=True)

    def _require_only_in(self, holder: TracedModule, layer: Any) -> None:
        """The layer is nowhere else than in that module, wherever the module is."""
        prefix = f"{holder.name}." if holder.name else ""
        inside = {name.removeprefix(prefix) for name in self._names[id(layer)] if name.startswith(prefix)}
        wanted = {
            f"{module_name}.{relative}" if module_name else relative
            for module_name in self._names[id(holder.module)]
            for relative in inside
        }
        if set(self._names[id(layer)]) != wanted:
            raise NotProven(f"{self._name_of(layer)} is registered in the model at several places")

    def _take_found(self, segment: Segment) -> None:
        """Take what an adapter returned: its layers stay even with a reason unless all are converted."""
        modules: list[Any] = [*segment.column, segment.row]
        names = [self._names.get(id(one), ["?"])[0] for one in modules]
        converted = [name for name in names if name in self._layers]
        if not converted:
            return
        try:
            for name in names:
                if name not in self._layers:
                    raise StaysEven(f"{name}, of the same segment, is not converted")
                if name in self._owner:
                    raise StaysEven(f"{name}, of the same segment, is in a segment that was named")
            self._take(segment, names[:-1], names[-1])
        except StaysEven as error:
            for name in converted:
                if name not in self._owner:
                    self._reasons.setdefault(name, str(error))

    def _take(self, segment: Segment, columns: Sequence[str], row: str, *, is_proven: bool = False) -> None:
        names = (*columns, row)
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise StaysEven(f"layer {twice[0]} is in it twice")
        for name in names:
            if name in self._owner:
                raise StaysEven(f"layer {name} is in another segment already, that of {self._owner[name].name}")
            self._require_movable(name)
        owned = self._owned(segment, columns, row)
        owned.may_draw = not is_proven
        if not is_proven:
            self._require_sound(segment, owned, columns, row)
        if is_proven and any(set(one.rows) != {1} for one in owned.tensors):
            raise StaysEven("what lies between changes the number of features")
        if segment.parts is not None and not is_proven:
            self.with_given_parts.update(columns)
        self._segments.append(owned)
        self._owner.update(dict.fromkeys(names, owned))
        for name in names:
            self._reasons.pop(name, None)

    def _require_sound(self, segment: Segment, owned: OwnedSegment, columns: Sequence[str], row: str) -> None:
        """Check of somebody's word what can be seen without running the model."""
        rows = {one.name.removesuffix(".weight"): one.rows for one in owned.tensors if one.attribute == "weight"}
        require_whole_heads(segment, {name: math.gcd(*rows[name]) for name in columns}, row, self._modules)
        num_units = owned.owned.counts[0]
        num_features = [num_units * of_part for name in (*columns, row) for of_part in rows[name]]
        require_follower(segment, num_units, num_features, (*columns, row), self._modules)
        units = owned.owned.units_of(group_rank(self._layers[row].process_group)).tolist()
        require_followed_tensors(segment, units, num_features, (*columns, row), self._modules)

    def _owned(self, segment: Segment, columns: Sequence[str], row: str) -> OwnedSegment:
        unit_size = segment.unit_size
        if unit_size < 1:
            raise StaysEven(f"unit_size={unit_size}: it must be at least 1")
        num_inputs = self._layers[row].even_shape[1]
        num_units, left = divmod(num_inputs, unit_size)
        if left or not num_units:
            raise StaysEven(
                f"{row} has {num_inputs} input features on a rank, which are no whole number of units of "
                f"unit_size={unit_size}"
            )
        names = (*columns, row)
        tensors: list[UnitTensor] = []
        for name in columns:
            rows = self._rows_of_unit(name, segment, num_units * self._num_ranks)
            tensors += self._unit_tensors(name, rows)
        if len(self._layers[row].parts or ()) > 1:
            raise StaysEven(f"{row} reads several parts, parts={self._layers[row].parts}")
        if not 0 <= segment.min_units <= num_units:
            raise StaysEven(f"min_units={segment.min_units}: allowed are 0 to {num_units}, what a rank has")
        # torch's clipping by the largest element is an error on a rank whose part of a DTensor is empty.
        least = max(segment.min_units, int(any(self._layers[name].has_dtensors for name in (*columns, row))))
        quantum = neuron_quantum(num_units * self._num_ranks, self._num_ranks) if unit_size == 1 else 1
        return OwnedSegment(
            name=row,
            kind=segment.kind,
            layers=names,
            tensors=(*tensors, *self._unit_tensors(row, (unit_size,))),
            owned=OwnershipMap.even(num_units * self._num_ranks, self._num_ranks),
            quantum=quantum,
            min_units=-(-least // quantum) * quantum,  # so that all counts are multiples
            on_change=segment.on_change,
            why_even=StillSound(self._model, {name: self._layers[name] for name in names}, segment.why_even),
            modules=tuple(self._layers[name] for name in names),
            dropouts=tuple(segment.dropouts),
            has_other_dropout=segment.has_other_dropout,
        )

    def _rows_of_unit(self, name: str, segment: Segment, num_units: int) -> tuple[int, ...]:
        """Of a column-parallel layer in each of its parts, as the segment, or who has split the layer, says."""
        known, size = self._layers[name].parts, self._layers[name].even_shape[0] * self._num_ranks
        given = known or 1 if segment.parts is None else segment.parts
        try:
            parts = checked_parts(given, size, num_units, name, "units")
        except ValueError as error:
            raise StaysEven(str(error)) from None
        if known not in (None, parts):
            raise StaysEven(
                f"{name} was split over the ranks as {described(known)}, and the segment says parts={segment.parts!r}: "
                f"{REMEDY}"
            )
        return tuple(part // num_units for part in parts)

    def _unit_tensors(self, name: str, rows: tuple[int, ...]) -> Iterator[UnitTensor]:
        layer: Any = self._layers[name]
        dim = 0 if layer.is_column_parallel != layer.weight_is_transposed else 1
        yield UnitTensor(layer, "weight", f"{name}.weight", dim, rows)
        if layer.is_column_parallel and parameters_of(layer).get("bias") is not None:
            yield UnitTensor(layer, "bias", f"{name}.bias", 0, rows)

    def _require_movable(self, name: str) -> None:
        layer: Any = self._layers[name]
        parameters = {key: parameter for key, parameter in parameters_of(layer).items() if parameter is not None}
        weight = parameters.get("weight")
        held = None if weight is None else local_of(weight)
        whole = None if held is None else (held.t() if layer.weight_is_transposed else held)
        if (
            whole is None
            or whole.shape != layer.local_weight.shape
            or whole.data_ptr() != layer.local_weight.data_ptr()
        ):
            raise StaysEven(f"{name} multiplies by something else than its weight")
        others = {*parameters, *buffers_of(layer), *children_of(layer)} - {"weight", "bias"}
        if others:
            raise StaysEven(f"{name} holds {', '.join(sorted(others))} beside its weight and bias")
        if getattr(layer, "bias", None) is not None and "bias" not in parameters:
            raise StaysEven(f"{name} makes its bias anew in every forward")
        for key, parameter in parameters.items():
            if self._uses[id(parameter)] > 1:
                raise StaysEven(f"{name} shares its {key} with another module")
        if (why := why_adapted(self._model, name) or layer.why_even) is not None:
            raise StaysEven(f"{name}: {why}")
        mode = getattr(layer, "seq_parallel_mode", None)
        if mode is not None:
            raise StaysEven(f"{name} has seq_parallel_mode={mode!r}")
        if not layer.is_column_parallel and not reads_its_slice(layer):
            raise StaysEven(f"{name}: {_SPLITS_ITSELF}")
        changed = why_changed(layer)
        if changed is not None:
            raise StaysEven(f"{name} {changed}")

    def _require_no_adapters(self, names: Sequence[str]) -> None:
        for name in names:
            if (why := why_adapted(self._model, name)) is not None:
                raise StaysEven(why)

    def _free(self, holder: str) -> list[str]:
        prefix = f"{holder}." if holder else ""
        return [name for name in self._layers if name.startswith(prefix) and name not in self._owner]

    def _name_of(self, layer: Any) -> str:
        return next((name for name in self._names.get(id(layer), ()) if name in self._layers), "?")

    def _named_layer(self, layer: str | nn.Module, segment: Segment, *, is_column: bool) -> str:
        """The name of a layer that the user names, by its name or itself."""
        if isinstance(layer, str):
            name = layer
            if name not in self._modules:
                raise StaysEven(f"the model has no layer {name!r}")
        elif id(layer) in self._names:
            name = self._name_of(layer) if self._name_of(layer) != "?" else self._names[id(layer)][0]
        else:
            raise StaysEven(f"a {type(layer).__name__} that it names is not in the model")
        if name not in self._layers:
            raise StaysEven(
                f"layer {name} is not converted; allowed are {', '.join(list(self._layers)[:8])}"
                f"{', …' if len(self._layers) > 8 else ''}"
            )
        if self._layers[name].is_column_parallel != is_column:
            kind, wanted = ("row", "column") if is_column else ("column", "row")
            raise StaysEven(f"layer {name} is {kind}-parallel, and {wanted} must name {wanted}-parallel layers")
        return name

    def _described(self, segment: Segment) -> str:
        """The segment as the user may have written it, its layers by their names."""
        column, row = [self._given_name(one) for one in segment.column], self._given_name(segment.row)
        return f"Segment(column={column}, row={row!r})"

    def _given_name(self, layer: str | nn.Module) -> str:
        """Return the name of a layer that a user names, also where it is not in the model."""
        return layer if isinstance(layer, str) else self._names.get(id(layer), [type(layer).__name__])[0]


def reads_its_slice(layer: Any) -> bool:
    """Tell whether a row-parallel layer's input is this rank's slice, and not the whole one."""
    return bool(getattr(layer, "input_is_parallel", getattr(layer, "parallel_input", True)))


def _ancestors(name: str) -> Iterator[str]:
    """Names of the modules that hold a layer, the nearest first and the model, "", last."""
    while name:
        name, _, _ = name.rpartition(".")
        yield name
