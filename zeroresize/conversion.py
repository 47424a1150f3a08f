"""convert(): make the parallel linear layers of a model balanceable, in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup

from zeroresize.comm.collectives import group_rank, group_ranks, group_size, require_group, same_ranks
from zeroresize.config.keys import checked_share_choice
from zeroresize.integrations.hosts import (
    GATHERED,
    VOCABULARY,
    HostAdapter,
    host_of,
    known_kinds,
    process_group_of,
)
from zeroresize.integrations.known_faults import warn_of_known_faults
from zeroresize.integrations.lora import all_matrices
from zeroresize.integrations.named_segments import require_all_features, require_heads_on_ranks
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segment import Segment
from zeroresize.layers.segments import all_segments, owned_segments
from zeroresize.layers.splitting import probably_untied, require_ties_kept
from zeroresize.layers.weight_checks import why_no_whole_weight
from zeroresize.measure.timed_products import measure_wanted_shares
from zeroresize.plan.ownership import checked_shares
from zeroresize.resharding.agreement import meet_over, meet_prepared
from zeroresize.resharding.data_parallel import sharded_optimizer, unwrap
from zeroresize.resharding.segments.divided_lora import divide_lora
from zeroresize.resharding.segments.search_segments import (
    WHOLE_UNITS,
    first_of,
    require_same_segments,
    search_segments,
    summary_of_segments,
)
from zeroresize.resharding.state_dict_guards import guard_save_pretrained
from zeroresize.resharding.units.owned_units import OwnedUnits, divide_units, require_segments
from zeroresize.utils.checked import checked
from zeroresize.utils.deadline import within
from zeroresize.utils.progress import Progress
from zeroresize.utils.torch_private import is_tensor_of_tensors

logger = logging.getLogger(__name__)


ModelT = TypeVar("ModelT", bound=nn.Module)
#: Whether a parallel linear layer may be balanced, of the layer and its name in the model.
ModuleFilter = Callable[[nn.Module, str], bool]


#: How long a rank that fails waits at most for the others, which may not be about to divide anything.
_MOST_WAIT = timedelta(seconds=10)


def _tell(model: nn.Module, shares: Any, process_group: ProcessGroup, error: ValueError) -> None:
    """Let other ranks fail, too, if they are about to divide."""
    if shares is not None and not (isinstance(shares, str) and shares == "even"):
        _meet_shortly(lambda: require_same_segments((), None, error, process_group, _device_of(model)))


def _meet_shortly(meet: Callable[[], object]) -> None:
    """Tell ranks that wait, by a meeting that fails; nobody may wait."""
    with suppress(Exception):
        within(_MOST_WAIT, meet)


def _tell_given(given: Mapping[str, Any], error: ValueError) -> None:
    model, process_group, module_filter_fn = (given[name] for name in ("model", "process_group", "module_filter_fn"))
    _tell(model, given["shares"], group_of(model, process_group, module_filter_fn), error)


@checked(tell=_tell_given)
def convert(
    model: ModelT,
    process_group: ProcessGroup | DeviceMesh | None = None,
    *,
    shares: Sequence[float] | Literal["even", "auto"] | None = None,
    segments: Sequence[Segment] = (),
    module_filter_fn: ModuleFilter | None = None,
    optimizer: Any = None,
) -> ModelT:
    """Swap the column- and row-parallel linear layers of ``model`` for balanced ones, in place.

    Needed only where a host's layers are to be swapped before something else looks at the model, or where one of the
    arguments is: :class:`~zeroresize.Balancer` converts a model that was not converted. Nothing here depends on how the
    model will be balanced.

    Taken are this package's own layers, Colossal-AI's ``Linear1D_Col`` and ``Linear1D_Row`` (after ``booster.boost`` or
    ``ShardFormer.optimize``), and those of any host that ``zeroresize.integrations.register_host`` was given. A swapped
    layer keeps the very same Parameter objects, and without a plan its outputs and gradients are bitwise those of the
    layer it replaces. A layer that cannot be balanced (gathered output, a weight that is made anew in
    every forward, sequence parallelism inside the layer, another group, …) stays exactly as it was; one log line says
    why. Where torch's styles, or transformers, have cut through units, ranks hold whole ones afterwards, in the same
    Parameters: collective then, and before the first backward.

    Args:
        model: the model, or what Colossal-AI's Booster made of it.
        process_group: the 1D tensor-parallel group, or a one-dimensional ``DeviceMesh`` of it; None for that of the
            model's parallel layers. A group of one rank is a no-op with a log line.
        shares: how to divide the units from the start, one number a rank, such as ``(2, 1, 1)`` where rank 0 is twice
            as fast. ``"auto"`` measures how fast the ranks multiply; ``"even"`` leaves units as the host made them,
            until a balancer moves them. Collective if given. By default the balancer divides by its ``config.shares``
            and ``config.memory_limits``.
            Where dropout lies between the layers make the balancer before the first step: it keys dropout by the unit.
        segments: what lies between which layers and can be divided by units, where that is not found: see
            :class:`~zeroresize.Segment`.
        module_filter_fn: called with every parallel linear layer and its name in the model (without the wrappers of
            Booster and DDP); returns whether it may be balanced. Layers that it refuses stay exactly as they are; one
            log line counts them. It must choose alike on every rank. None for all layers.
        optimizer: only where ``shares`` are given and the optimizer has stepped, or keeps copies of the weights, as in
            mixed precision.

    Returns:
        ``model`` itself. Converting it again changes nothing; one log line says so. Without a filter the layers of the
        first time stay; with one it must choose the same.

    Raises:
        ValueError: if ``process_group`` lacks this rank, or is None and the model's layers are of several groups or
            tell of none; if the model has no layer that can be balanced, or the group has one rank and the model's
            layers are of a larger one; if the model is converted again with a filter that chooses other layers, with
            ``segments`` or with ``shares``; for ``segments`` that do not fit the model, and ``shares`` that are no
            division of it, or that ``optimizer`` does not allow, as it sees whole matrices.
        TypeError: if a host adapter does not make a layer balanceable in place.
    """
    group = group_of(model, process_group, module_filter_fn)
    inner, is_first_rank = unwrap(model), group_rank(group) == 0
    require_ties_kept(inner)
    all_matrices(inner)  # which knows their features
    require_all_features(inner)
    try:
        wanted = None if shares is None else checked_share_choice(shares, group_size(group))
        if isinstance(wanted, tuple):
            wanted = checked_shares(wanted, group_size(group))
    except ValueError as refused:
        _tell(model, shares, group, refused)
        raise
    if group_size(group) == 1:
        _require_no_other_group(model)
        logger.info("convert: the process group has one rank, so there is nothing to balance")
        return model
    if any(layer.is_searched for layer in balanced_layers(model).values()):
        if segments or wanted is not None:
            raise ValueError(
                "convert: the model is converted already: its segments stay as they are, and a balancer's "
                "move(shares) divides them anew"
            )
        _convert_again(model, group, module_filter_fn)
        return model

    if is_first_rank and (untied := next(probably_untied(inner), None)) is not None:
        logger.warning(
            "%s and %s hold the same numbers, as if splitting had untied one weight: split both with zeroresize's "
            "styles, or let one layer have the other's parameter after the split",
            *untied,
        )
    converted_before = list(balanced_layers(model).values())
    choice = _Choice()
    error: Exception | None = None
    try:
        choice = _swap_layers(model, group, module_filter_fn)
        if not balanced_layers(model):
            raise ValueError(_nothing_to_convert(model, choice))
        divide_lora(inner)
        with Progress("convert: looking for units of the model", tell=logger.info, is_shown=is_first_rank):
            _search(model, balanced_layers(model), group, segments)
        require_heads_on_ranks(inner)
    except Exception as raised:  # other ranks may be about to divide
        error = raised
    layers = balanced_layers(model)
    try:
        if error is not None and wanted in (None, "even"):
            if any(layer.has_dtensors for layer in layers.values()):
                _meet_shortly(lambda: meet_prepared(meet_over(group, _device_of(model)), error, WHOLE_UNITS))
            raise error
        if wanted == "even":
            for segment in all_segments(layers):
                segment.has_given_shares = True
        elif wanted is not None:
            _divide(model, group, wanted, optimizer, error)
    except Exception:
        if all(segment.owned.is_home for segment in all_segments(layers)):  # it may be converted again, rightly
            for layer in layers.values():
                layer.is_converted = layer in converted_before
                layer.segment = layer.stays_even = None
        raise
    guard_save_pretrained(inner)
    if is_first_rank:
        warn_of_known_faults(inner, optimizer)
        counts = {"left alone": len(choice.left_alone), "left out by module_filter_fn": len(choice.filtered)}
        others = "".join(f", {number} were {what}" for what, number in counts.items() if number)
        logger.info("convert: %d layers can be balanced%s; %s", len(layers), others, summary_of_segments(layers))
    return model


def group_of(
    model: nn.Module,
    process_group: ProcessGroup | DeviceMesh | None = None,
    module_filter_fn: ModuleFilter | None = None,
) -> ProcessGroup:
    """Return ``process_group``, or the tensor-parallel group of the model's layers.

    That is the group of the layers that are converted; where none is, of the parallel layers that can be, or of all
    where none can.

    Args:
        module_filter_fn: as of :func:`convert`; layers that it refuses do not count.

    Raises:
        ValueError: if it is None and the layers are of several groups, naming two of them, or there are no layers; if
            this rank is not in it.
    """
    if process_group is not None:
        return require_group(process_group)
    layers = balanced_layers(model)
    groups = {name: layer.process_group for name, layer in layers.items()}
    if not any(layer.is_searched for layer in layers.values()):  # convert() leaves layers of other groups on purpose
        is_only = not groups
        left_alone: dict[str, ProcessGroup] = {}
        for name, module, host in _parallel_layers(model):
            if module_filter_fn is None or module_filter_fn(module, name):
                group = process_group_of(host, module)
                if is_only or group_size(group) > 1:
                    (left_alone if _why_unfit(name, module, host) else groups)[name] = group
        groups = groups or left_alone
    if not groups:
        raise ValueError(_nothing_to_convert(model, _Choice()))
    first_name, first = next(iter(groups.items()))
    for name, group in groups.items():
        if not same_ranks(group, first):
            raise ValueError(
                f"the model has parallel layers of two process groups: {first_name} of ranks "
                f"{group_ranks(first)} and {name} of ranks {group_ranks(group)} of the "
                "job. A balancer is for one: pass process_group= to convert, which leaves the layers of others alone"
            )
    return require_group(first)


def balanced_layers(model: nn.Module) -> dict[str, BalancedLinear]:
    """Return the converted layers of ``model`` by name, in the order of the model."""
    return {
        name: module
        for name, module in unwrap(model).named_modules()
        if isinstance(module, BalancedLinear) and module.is_converted
    }


@dataclass
class _Choice:
    """Which parallel layers were not converted: why by name, and names of those that the filter refused."""

    left_alone: dict[str, str] = field(default_factory=dict)
    filtered: list[str] = field(default_factory=list)


def _convert_again(model: nn.Module, process_group: ProcessGroup, module_filter_fn: ModuleFilter | None) -> None:
    """Look for the segments of layers that ``parallelize_module`` made since; all others stay as they are."""
    layers = balanced_layers(model)
    if module_filter_fn is not None:
        chosen = [
            name
            for name, module, host in _parallel_layers(model)
            if module_filter_fn(module, name)
            and (name in layers or _why_left_alone(name, module, host, process_group) is None)
        ]
        if others := sorted({*chosen} ^ {*layers}):
            raise ValueError(
                f"convert: the model is converted already, and module_filter_fn chooses other layers: it differs in "
                f"{first_of(others)}. Convert a model that is not converted yet with this filter, or this one without"
            )
    divide_lora(unwrap(model))
    new = {name: layer for name, layer in layers.items() if not layer.is_searched}
    if not new:
        logger.info("convert: the model is converted already, nothing was changed")
        return
    _search(model, new, process_group)
    if group_rank(process_group) == 0:
        logger.info("convert: %d more layers can be balanced; %s", len(new), summary_of_segments(new))


def _search(
    model: nn.Module,
    layers: Mapping[str, BalancedLinear],
    process_group: ProcessGroup,
    segments: Sequence[Segment] = (),
) -> None:
    """Find the segments of layers, which learn their names for errors."""
    for name, layer in layers.items():
        layer.name_in_model = name
    search_segments(model, layers, process_group, segments)


def _divide(
    model: nn.Module,
    process_group: ProcessGroup,
    shares: tuple[float, ...] | str,
    optimizer: Any,
    error: Exception | None,
) -> None:
    """Divide the units of all segments by ``shares``; collective, also for a rank that has failed before."""
    layers = balanced_layers(model)
    device = _device_of(model)
    require_same_segments(owned_segments(layers), shares, error, process_group, device)
    require_segments(shares, owned_segments(layers))
    meet = meet_over(process_group, device)
    numbers = measure_wanted_shares(shares, layers, process_group, meet)
    if sharded_optimizer(optimizer) is not None:
        raise ValueError("shares= with an optimizer that is sharded over replicas: have a Balancer divide the units")
    units = OwnedUnits(model, layers, optimizer, process_group, meet=meet)
    units.agree()
    divide_units(units, checked_shares(numbers, group_size(process_group)))


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _swap_layers(model: nn.Module, process_group: ProcessGroup, module_filter_fn: ModuleFilter | None) -> _Choice:
    """Swap what can be swapped, and mark it as converted."""
    choice = _Choice()
    matrices = all_matrices(unwrap(model))
    for name, module, host in _parallel_layers(model):
        if isinstance(module, BalancedLinear):
            module.is_converted = False  # parallelize_module may have converted it
        if module_filter_fn is not None and not module_filter_fn(module, name):
            choice.filtered.append(name)
            continue
        reason = _why_left_alone(name, module, host, process_group)
        if reason is not None:
            choice.left_alone[name] = reason
            # A gathered classifier is usual; anything else a user would want to know.
            level = logging.INFO if reason in (GATHERED, VOCABULARY) else logging.WARNING
            logger.log(level, "convert: layer %s is left alone: %s", name, reason)
            continue
        layer = host.swap_layer(module)
        if layer is not module or not isinstance(module, BalancedLinear):
            raise TypeError(
                f"convert: the adapter {type(host).__name__} did not make layer {name} ({type(module).__name__}) a "
                "BalancedLinear in place: swap_layer must change the layer's class and return the same layer"
            )
        module.is_converted = module not in matrices  # which are divided, but not balanced
    return choice


def _require_no_other_group(model: nn.Module) -> None:
    for name, module, host in _parallel_layers(model):
        num_ranks = group_size(process_group_of(host, module))
        if num_ranks > 1 and _why_unfit(name, module, host) is None:
            raise ValueError(
                f"convert: process_group has one rank, and layer {name} is split over {num_ranks}: pass the "
                "tensor-parallel group"
            )


def _parallel_layers(model: nn.Module) -> Iterator[tuple[str, Any, HostAdapter]]:
    """Parallel linear layers of all hosts: name, layer, and the adapter that knows it."""
    for name, module in unwrap(model).named_modules():
        host = host_of(module)
        if host is not None:
            yield name, module, host


def _why_left_alone(name: str, module: Any, host: HostAdapter, process_group: ProcessGroup) -> str | None:
    if (reason := _why_unfit(name, module, host)) is not None:
        return reason
    if not same_ranks(process_group_of(host, module), process_group):
        return "it belongs to another process group"
    if not _moves_only(module, host) and module.weight.shape[1] < 2:
        return "it has fewer than two input features"
    return None


def _why_unfit(name: str, module: Any, host: HostAdapter) -> str | None:
    """Why a layer is left alone whatever its group; None if it is not."""
    if name.removesuffix(".base_layer").rpartition(".")[2] in getattr(host, "vocabulary_heads", ()):
        return VOCABULARY
    gathered = GATHERED if getattr(module, "gather_output", False) else None
    if _moves_only(module, host):
        return host.why_left_alone(module)
    return host.why_left_alone(module) or why_no_whole_weight(module) or gathered


def _moves_only(module: Any, host: HostAdapter) -> bool:
    """Whether a layer computes, or will, by its host's own forward."""
    return bool(getattr(module if isinstance(module, BalancedLinear) else host, "moves_only", False))


def _nothing_to_convert(model: nn.Module, choice: _Choice) -> str:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.left_alone.items()) or "none"
    if choice.filtered:
        reasons += f". module_filter_fn left out {first_of(choice.filtered)}"
    sharded = {
        name: type(each).__name__ for name, each in unwrap(model).named_parameters() if is_tensor_of_tensors(each)
    }
    if sharded:
        return (
            f"convert: the model has no layer that can be balanced, and {len(sharded)} of its parameters are "
            f"{', '.join(sorted(set(sharded.values())))}s, as parallelize_module and fully_shard make them: "
            f"{first_of(list(sharded))}. Taken are nn.Linear layers that parallelize_module has split by "
            f"ColwiseParallel and RowwiseParallel, torch's or zeroresize's. Parallel layers left alone: {reasons}"
        )
    return (
        f"convert: the model has no layer that can be balanced. Wanted are {known_kinds()}, or layers of a host that "
        f"zeroresize.integrations.register_host was given. Parallel layers found but left alone: {reasons}"
    )
