"""find_segments(): which layers of a converted model form segments, so that units can be owned unevenly.

A segment is the column-parallel layers that read one replicated x, the row-parallel layer whose y is summed, and what
lies between, which must treat units independently of each other. That is known of a module's class
(:mod:`zeroresize.integrations.known_modules`), proven by tracing (:mod:`~zeroresize.integrations.traced_segments`), or
the user's word.

``N`` output and ``K`` input features of a layer on this rank, ``U`` units of all ``R`` ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

import zeroresize.integrations.transformers_segments  # noqa: F401 - it registers what it knows
from zeroresize.comm.collectives import group_rank
from zeroresize.integrations.changed_modules import why_changed
from zeroresize.integrations.known_modules import StaysEven, registered_segments
from zeroresize.integrations.lora import base_of, is_lora, matrices_of, of_bases, outer_name, why_adapted
from zeroresize.integrations.named_segments import require_sound
from zeroresize.integrations.packed_layers import REMEDY, described, require_right_parts
from zeroresize.integrations.traced_segments import FromOutside, NotProven, TracedAgain, reached_around, traced_segment
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.linear import ParallelLinear
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segment import OwnedSegment, Segment, UnitTensor
from zeroresize.layers.splitting import checked_parts
from zeroresize.plan.ownership import OwnershipMap, neuron_quantum, slices_of
from zeroresize.utils.torch_private import buffers_of, children_of, is_dtensor, parameters_of

_SPLITS_ITSELF = "it takes the whole input and splits it evenly itself"
_TRY_IT = "zeroresize.check_segments(model, batch) shows whether a segment that is named moves soundly"
_NAME_IT = "name it by zeroresize.Segment(column=[...], row=..., unit_size=...)"


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
        self._uses = Counter(id(each) for module in model.modules() for each in parameters_of(module).values())
        #: Parameters that change hands, by their ``id``, with the segment's name.
        self._taken: dict[int, str] = {}
        #: By name of each of its layers.
        self._segments: dict[str, OwnedSegment] = {}
        self._reasons: dict[str, str] = {}
        #: Layers of whose weights somebody says how they are packed on a rank.
        self.with_given_parts: set[str] = set()
        #: For a column-parallel layer, the row-parallel one that may have ended its segment.
        self._ends_at: dict[str, str] = {}

    def result(self) -> tuple[list[OwnedSegment], dict[str, str]]:
        segments = sorted(set(self._segments.values()), key=lambda segment: self._order[segment.name])
        return segments, {name: self._reason(name) for name in self._layers if name not in self._segments}

    def _reason(self, name: str) -> str:
        layer = self._layers[name]
        row = self._ends_at.get(name)
        if (why := layer.why_even or why_adapted(self._model, name, layer)) is not None:  # naming it would be refused
            return why
        if name in self._reasons:
            return self._reasons[name]
        if row in self._reasons:
            return f"no segment with {row}: {self._reasons[row]}"
        if layer.is_column_parallel:
            return f"no row-parallel layer was found that reads what it returns: {_NAME_IT}"
        return f"its input is no output of a column-parallel layer: {_NAME_IT}"

    def take_named(self, segment: Segment) -> None:
        given = [(layer, True) for layer in (*segment.column, *segment.shared)] + [(segment.row, False)]
        try:
            *columns, row = [self._named_layer(layer, is_column=is_column) for layer, is_column in given]
            if not segment.column and not self._layers[row].is_segment:
                raise StaysEven("it names no column-parallel layer")
            self._take(segment, columns, row)
        except StaysEven as error:
            *columns, row = [
                layer if isinstance(layer, str) else self._names.get(id(layer), [type(layer).__name__])[0]
                for layer, _ in given
            ]
            raise ValueError(f"Segment(column={columns}, row={row!r}): {error}. {_TRY_IT}") from None

    def take_registered(self) -> None:
        for module in self._modules.values():
            try:
                for segment in registered_segments(module):
                    names = [self._names.get(id(layer), ["?"])[0] for layer in of_bases(segment).layers]
                    self._take_registered(segment, names)
            except StaysEven as error:
                name = self._names[id(module)][0]
                for layer_name in (*self._free(name), *({name} & self._layers.keys())):
                    self._reasons.setdefault(layer_name, f"{type(module).__name__}: {error}")

    def _take_registered(self, segment: Segment, names: Sequence[str]) -> None:
        """Take what an adapter returned: its layers stay even with a reason unless all are converted, and free."""
        free = [name for name in names if name in self._layers and name not in self._segments]
        try:
            if free:
                self._take(segment, names[:-1], names[-1])
        except StaysEven as error:
            for name in free:
                self._reasons.setdefault(name, str(error))

    def take_traced(self) -> None:
        for name, row in self._layers.items():
            if row.is_column_parallel or name in self._segments or name in self._reasons:
                continue
            if row.is_segment or not reads_its_slice(row):
                self._reasons[name] = _NAME_IT.replace("[...]", "[]") if row.is_segment else _SPLITS_ITSELF
                continue
            for holder in _ancestors(name):
                inside = [each for each in self._free(holder) if self._layers[each].is_column_parallel]
                inside = [each for each in inside if each not in self._reasons]
                if not inside:
                    continue
                try:
                    self._take_traced(holder, name, row)
                except FromOutside as error:
                    self._reasons[name] = str(error)
                    continue
                except (NotProven, StaysEven) as error:
                    self._reasons[name] = f"{error}: {_NAME_IT}"
                    for layer_name in inside:
                        self._ends_at.setdefault(layer_name, name)
                break

    def _take_traced(self, holder: str, name: str, row: BalancedLinear) -> None:
        module = self._modules[holder]
        traced = traced_segment(module, holder, row)
        columns, blocks = traced.columns, set(traced.columns.values())
        if len(blocks) > 1:
            raise NotProven("its column-parallel layers hold different numbers of blocks")
        layers: list[Any] = [*columns, row]
        if outside := reached_around(module, layers, self._model):
            raise NotProven(f"{self._name_of(outside[0])} is registered in the model at several places")
        segment = Segment(
            layers[:-1],
            layers[-1],
            parts=blocks.pop(),
            min_units=0,
            kind="neurons",
            dropouts=[(dropout, -1) for dropout in traced.dropouts],
            has_other_dropout=traced.has_other_dropout,
            why_even=TracedAgain(self._model, module, holder, row, traced),
        )
        names = sorted(map(self._name_of, columns), key=self._order.__getitem__)
        self._take(segment, names, name, is_proven=True)

    def _take(self, segment: Segment, columns: Sequence[str], row: str, *, is_proven: bool = False) -> None:
        names = (*columns, row)
        if len(set(names)) < len(names):
            raise StaysEven(f"layer {Counter(names).most_common(1)[0][0]} is in it twice")
        for name in names:
            if name not in self._layers:
                raise StaysEven(f"{name}, of the same segment, is not converted")
            if name in self._segments:
                raise StaysEven(f"layer {name} is in another segment already, that of {self._segments[name].name}")
            self._require_movable(name)
        owned = self._owned(segment, columns, row)
        owned.may_draw = not is_proven
        for tensor in owned.tensors:
            if (other := self._taken.get(id(tensor.parameter))) is not None:
                raise StaysEven(f"{tensor.name} is in another segment already, that of {other}")
            if self._uses[id(tensor.parameter)] > 1:
                raise StaysEven(f"{tensor.name} is shared with another module")
        if not is_proven:
            rows = {tensor.owner: tensor.rows for tensor in reversed(owned.tensors)}
            rank = group_rank(self._layers[row].process_group)
            units = owned.owned.blocks_of(rank, owned.owned.slices).tolist()
            of_layers = {name: rows[self._layers[name]] for name in names}
            moving = {id(tensor.parameter) for tensor in owned.tensors}
            by_hosts = [layer for layer in owned.modules if layer.moves_only]  # whose adapter knows of all
            moving |= {id(each) for layer in by_hosts for each in (*layer.parameters(), *layer.buffers())}
            require_sound(segment, of_layers, units, self._modules, moving)
            if segment.parts is not None:
                self.with_given_parts.update(columns)
        self._taken |= {id(tensor.parameter): owned.name for tensor in owned.tensors}
        for name in names:
            self._segments[name] = owned
            self._reasons.pop(name, None)

    def _owned(self, segment: Segment, columns: Sequence[str], row: str) -> OwnedSegment:
        unit_size, num_inputs = segment.unit_size, self._layers[row].whole_size
        num_units, left = divmod(num_inputs, unit_size)
        block = segment.group_size
        if num_units % block:
            raise StaysEven(f"{num_units} units are no whole groups of group_size={block}")
        if block > 1 and not segment.shared:
            raise StaysEven(f"group_size={block} needs the layers whose rows units share: name them by shared=")
        is_single = segment.shared and len(segment.column) == 1
        if segment.divisible and not (is_single and not segment.dropouts and not segment.extra):
            raise StaysEven("divisible=True needs one layer of queries, k and v by shared=, no dropouts=, no extra=")
        has_lora = any(outer_name(name, self._modules) != name for name in (*columns, row))
        slices = slices_of(num_units, self._num_ranks) if segment.divisible and not has_lora else 1
        owned = OwnershipMap.home(num_units * slices, self._num_ranks, block * slices, slices)
        num_here, names = min(owned.counts), (*columns, row)
        if left or not num_here:
            raise StaysEven(
                f"{row} reads {num_inputs} features, which are no whole units of unit_size={unit_size}"
                f"{f', in groups of {block},' if block > 1 else ''} for each of {self._num_ranks} ranks"
            )
        tensors: list[UnitTensor] = []
        for number, name in enumerate(columns):
            is_shared = number >= len(segment.column)
            of_layer = block if is_shared else 1
            rows = self._rows(name, segment, num_units // of_layer)
            if of_layer * slices > 1 and len(rows) > 1:
                raise StaysEven(f"{name} holds several parts, whose rows no units can share")
            tensors += self._tensors(name, rows, of_layer * slices, is_shared=is_shared)
        tensors += self._tensors(row, (unit_size,), slices, is_shared=False)
        units_here = len(owned.units_of(group_rank(self._layers[row].process_group)))
        for given in segment.extra:
            wanted, dim = (given, 0) if isinstance(given, str | nn.Parameter) else given
            where = self._extra(wanted, dim, units_here)
            if any(where.parameter is tensor.parameter for tensor in tensors):
                raise StaysEven(f"extra: {where.name} is in it twice")
            tensors.append(where)
        if len(self._layers[row].parts or ()) > 1:
            raise StaysEven(f"{row} reads several parts, parts={self._layers[row].parts}")
        if segment.min_units * slices > num_here:
            raise StaysEven(f"min_units={segment.min_units}: allowed are 0 to {num_here // slices}, what a rank has")
        # torch's clipping by the largest element is an error on a rank whose part of a DTensor is empty.
        least = max(segment.min_units, int(any(self._layers[name].has_dtensors for name in names)))
        quantum = neuron_quantum(num_units, self._num_ranks) if unit_size == block == 1 else 1
        least *= slices
        held = OwnedSegment(
            name=row,
            kind=segment.kind,
            layers=names,
            tensors=tuple(tensors),
            owned=owned,
            quantum=quantum,
            min_units=-(-least // quantum) * quantum,  # so that all counts are multiples
            on_change=segment.on_change,
            why_even=_still_sound(self._model, {name: self._layers[name] for name in names}, segment.why_even),
            modules=tuple(self._layers[name] for name in names),
            dropouts=tuple(segment.dropouts),
            has_other_dropout=segment.has_other_dropout,
            replicated=(*map(self._place_of, segment.replicated), *self._scales_of_all(names)),
        )
        cut = next((where.owner for where in held.cut if _stays_cut(where, slices)), None)
        if cut is not None:
            name = self._name_of(cut)
            raise StaysEven(
                f"{name} is divided {' : '.join(map(str, cut.home))}, not by whole units of unit_size={unit_size}, "
                "one more on the first ranks: split it with that unit_size="
            )
        return held

    def _rows(self, name: str, segment: Segment, num_units: int) -> tuple[int, ...]:
        """Of a unit in each part of a column-parallel layer, as the segment, or who has split the layer, says."""
        known, size = self._layers[name].parts, self._layers[name].whole_size
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

    def _tensors(self, name: str, rows: tuple[int, ...], block: int, *, is_shared: bool) -> Iterator[UnitTensor]:
        """Of a layer, and of LoRA's matrices around it."""
        outer, layers = outer_name(name, self._modules), dict[str, Any]({name: self._layers[name]})
        if outer != name:
            layers |= {f"{outer}.{key}": matrix for key, matrix in matrices_of(self._modules[outer]).items()}
        for of_layer, layer in layers.items():
            for key, dim in layer.unit_dims.items():
                if layer.moves_only:
                    rows_here = self._rows_by_host(layer, key, of_layer, rows)
                    yield UnitTensor(layer, key, f"{of_layer}.{key}", dim, rows_here, block, is_shared)
                elif key == "weight" or parameters_of(layer).get(key) is not None:
                    yield UnitTensor(layer, key, f"{of_layer}.{key}", dim, rows, block, is_shared)

    def _rows_by_host(self, layer: Any, key: str, name: str, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Of a unit in one of the tensors of a layer whose features have these rows of it."""
        size, num_units = local_of(getattr(layer, key)).shape[layer.unit_dims[key]], layer.num_features // sum(rows)
        parts = (1,) * layer.unit_parts[key] if key in layer.unit_parts else rows
        if any(size * part % (num_units * sum(parts)) for part in parts):
            raise StaysEven(
                f"{name}.{key} has {size} entries in dimension {layer.unit_dims[key]} on this rank, which are not "
                f"equally many in {len(parts)} parts for each of its {num_units} units"
            )
        return tuple(size * part // (num_units * sum(parts)) for part in parts)

    def _extra(self, wanted: str | nn.Parameter, dim: int, units_here: int) -> UnitTensor:
        """A parameter of a segment's units that is in no layer; at even shares this rank has so many of them."""
        named = dict(self._model.named_parameters())
        name = next((name for name, one in named.items() if one is wanted), wanted)
        if not isinstance(name, str) or name not in named:
            shown = repr(wanted) if isinstance(wanted, str) else f"a parameter of shape {tuple(wanted.shape)}"
            raise StaysEven(f"extra: the model has no parameter {shown}; buffers of units are for on_change to set")
        parameter, (holder, _, attribute) = named[name], name.rpartition(".")
        owner, shape = self._modules[holder], tuple(parameter.shape)
        if isinstance(owner, BalancedLinear):
            raise StaysEven(f"extra: {name} is of a parallel layer: name that by column=, shared= or row=")
        if is_dtensor(parameter):
            raise StaysEven(f"extra: {name} is a DTensor, whose placements its forward would read: keep a plain tensor")
        if not 0 <= dim < len(shape) or not shape[dim] or shape[dim] % units_here:
            raise StaysEven(
                f"extra: {name} has the shape {shape} on this rank, and dimension {dim} must hold equally many rows for"
                f" each of the rank's {units_here} units"
            )
        return UnitTensor(owner, attribute, name, dim, (shape[dim] // units_here,))

    def _scales_of_all(self, names: Sequence[str]) -> Iterator[tuple[Any, str, str]]:
        """What hosts' own layers hold for all units and nothing trains, as a scale of a whole weight."""
        layers: list[tuple[str, Any]] = [(name, self._layers[name]) for name in names]
        for name, layer in ((name, layer) for name, layer in layers if layer.moves_only):
            frozen = ((key, each) for key, each in layer.named_parameters() if not each.requires_grad)
            for key, _ in (*frozen, *layer.named_buffers()):
                if key not in layer.unit_dims:
                    holder, _, attribute = key.rpartition(".")
                    yield layer.get_submodule(holder), attribute, f"{name}.{key}"

    def _place_of(self, parameter: nn.Parameter) -> tuple[nn.Module, str, str]:
        """The module that holds a parameter, by which name, and that in the model: it may be replaced later."""
        name = next((name for name, each in self._model.named_parameters() if each is parameter), None)
        if name is None:
            raise StaysEven(f"replicated: the model has no such parameter, of shape {tuple(parameter.shape)}")
        return self._modules[name.rpartition(".")[0]], name.rpartition(".")[2], name

    def _require_movable(self, name: str) -> None:
        layer: Any = self._layers[name]
        parameters = {key: parameter for key, parameter in parameters_of(layer).items() if parameter is not None}
        if layer.moves_only:
            if why := why_adapted(self._model, name, layer) or layer.why_even or why_changed(layer):
                raise StaysEven(f"{name}: {why}")
            return
        held = local_of(parameters["weight"]) if "weight" in parameters else None
        whole = held.t() if held is not None and layer.weight_is_transposed else held
        local = layer.local_weight
        mode = getattr(layer, "seq_parallel_mode", None)
        if whole is None or whole.shape != local.shape or whole.data_ptr() != local.data_ptr():
            raise StaysEven(f"{name} multiplies by something else than its weight")
        if others := {*parameters, *buffers_of(layer), *children_of(layer)} - {"weight", "bias"}:
            raise StaysEven(f"{name} holds {', '.join(sorted(others))} beside its weight and bias")
        if getattr(layer, "bias", None) is not None and "bias" not in parameters:
            raise StaysEven(f"{name} makes its bias anew in every forward")
        for key, parameter in parameters.items():
            if self._uses[id(parameter)] > 1:
                raise StaysEven(f"{name} shares its {key} with another module")
        if (why := why_adapted(self._model, name, layer) or layer.why_even) is not None:
            raise StaysEven(f"{name}: {why}")
        if mode not in (None, "split_gather"):  # attention exchanges heads, or keys, with other ranks
            raise StaysEven(f"{name} has seq_parallel_mode={mode!r}")
        if not layer.is_column_parallel and not reads_its_slice(layer):
            raise StaysEven(f"{name}: {_SPLITS_ITSELF}")
        if (changed := why_changed(layer)) is not None:
            raise StaysEven(f"{name} {changed}")

    def _free(self, holder: str) -> list[str]:
        """Names of layers in a module that are in no segment yet."""
        prefix = f"{holder}." if holder else ""
        return [name for name in self._layers if name.startswith(prefix) and name not in self._segments]

    def _name_of(self, layer: Any) -> str:
        names = self._names[id(layer)]
        return next((name for name in names if name in self._layers), names[0])

    def _named_layer(self, layer: str | nn.Module, *, is_column: bool) -> str:
        """The name of a layer that the user names, by its name or itself."""
        if isinstance(layer, nn.Module) or is_lora(self._modules.get(layer)):
            layer = base_of(self._modules[layer] if isinstance(layer, str) else layer)
        if isinstance(layer, str) and layer not in self._modules:
            raise StaysEven(f"the model has no layer {layer!r}")
        if not isinstance(layer, str) and id(layer) not in self._names:
            raise StaysEven(f"a {type(layer).__name__} that it names is not in the model")
        name = layer if isinstance(layer, str) else self._name_of(layer)
        if name not in self._layers:
            raise StaysEven(
                f"layer {name} is not converted; allowed are {', '.join(list(self._layers)[:8])}"
                f"{', …' if len(self._layers) > 8 else ''}"
            )
        if self._layers[name].is_column_parallel != is_column:
            kind, wanted = ("row", "column") if is_column else ("column", "row")
            raise StaysEven(f"layer {name} is {kind}-parallel, and {wanted} must name {wanted}-parallel layers")
        return name


def _still_sound(
    model: nn.Module, layers: Mapping[str, Any], why_even: Callable[[], str | None] | None
) -> Callable[[], str | None]:
    """Make what tells, before units move, why they must stay: what was put on the layers since, or ``why_even``."""

    def ask() -> str | None:
        for name, layer in layers.items():
            if (changed := why_adapted(model, name, layer) or why_changed(layer)) is not None:
                return f"{name} {changed}"
        return None if why_even is None else why_even()

    return ask


def _stays_cut(where: UnitTensor, slices: int) -> bool:
    """Whether what ranks hold of a parameter stays: of torch's DTensors, and of shared rows, they may hold others."""
    layer = where.owner
    is_inner = not layer.is_converted or where.block > slices  # LoRA's matrices follow their layer
    is_known = layer.has_dtensors or (is_inner and isinstance(layer, ParallelLinear))
    may_change = is_known and not layer.refused_at_home and len(layer.parts or ()) == 1
    return not may_change or layer.is_sharded_further(layer.weight) or layer.weight.is_meta


def reads_its_slice(layer: Any) -> bool:
    """Tell whether a row-parallel layer's input is this rank's slice, and not the whole one."""
    return bool(getattr(layer, "input_is_parallel", getattr(layer, "parallel_input", True)))


def _ancestors(name: str) -> Iterator[str]:
    """Names of the modules that hold a layer, the nearest first and the model, "", last."""
    while name:
        name, _, _ = name.rpartition(".")
        yield name
