"""convert(): make the parallel linear layers of a model balanceable, in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import (
    group_ranks,
    group_size,
    require_group,
    same_ranks,
    world_size,
)
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import AWAY_MODES, MOVING_MODES, SHARE_CHOICES
from zeroresize.integrations.find_segments import find_segments
from zeroresize.integrations.hosts import HostAdapter, host_of, known_kinds
from zeroresize.integrations.key_dropout import key_dropout
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segment import OwnedSegment, Segment
from zeroresize.layers.segments import owned_segments
from zeroresize.layers.unit_dropout import mixed
from zeroresize.layers.weight_checks import is_sharded, why_no_whole_weight
from zeroresize.measure.device_speed import measured_shares
from zeroresize.measure.step_timer import LayerTimer
from zeroresize.plan.ownership import checked_shares
from zeroresize.resharding.agreement import Meet, meet_over
from zeroresize.resharding.data_parallel import unwrap
from zeroresize.resharding.same_segments import require_same_segments
from zeroresize.resharding.state_dicts import guard_modules, guard_save_pretrained
from zeroresize.resharding.units_in_force import UnitsInForce

logger = logging.getLogger(__name__)

GATHERED = "gather_output=True"

ModelT = TypeVar("ModelT", bound=nn.Module)
#: Whether a parallel linear layer may be balanced, of the layer and its name.
ModuleFilter = Callable[[nn.Module, str], bool]


def convert(
    model: ModelT,
    *,
    process_group: ProcessGroup,
    config: BalanceConfig,
    module_filter_fn: ModuleFilter | None = None,
    segments: Sequence[Segment] = (),
    shares: Sequence[float] | Literal["even", "auto"] | None = None,
    optimizer: Any = None,
) -> ModelT:
    """Swap the column- and row-parallel linear layers of ``model`` for balanced ones, in place.

    Taken are this package's own layers, Colossal-AI's ``Linear1D_Col`` and ``Linear1D_Row`` (after ``booster.boost`` or
    ``ShardFormer.optimize``), and those of any host that ``zeroresize.integrations.register_host`` was given. A swapped
    layer keeps the very same Parameter objects, and without a plan its outputs and gradients are bitwise those of the
    layer it replaces. A layer that cannot be balanced (gathered output, a weight that is made anew in
    every forward, sequence parallelism inside the layer, another group, …) stays exactly as it was; one log line says
    why.

    Args:
        model: the model, or what Colossal-AI's Booster made of it.
        process_group: the 1D tensor-parallel group. A group of one rank is a no-op with a log line.
        config: how it will be balanced; pass the same to :class:`~zeroresize.Balancer`.
        module_filter_fn: called with every parallel linear layer and its name in the model (without the wrappers of
            Booster and DDP); returns whether it may be balanced. Layers that it refuses stay exactly as they are; one
            log line counts them. It must choose alike on every rank. None for all layers.
        segments: what lies between which layers and can be divided by units, where that is not found: see
            :class:`~zeroresize.Segment`.
        shares: how to divide the units from the start, one number a rank, such as ``(2, 1, 1)`` where rank 0 is twice
            as fast, or has twice the memory: then with ``moves=False``, since decisions look at time only. ``"auto"``
            measures how fast the ranks multiply. Collective then. By default ``config.shares``; ``"even"`` leaves them
            as the host made them, until a balancer moves them.
        optimizer: only where ``shares`` are given and the optimizer has stepped, or keeps copies of the weights, as in
            mixed precision.

    Returns:
        ``model`` itself. Converting it again changes nothing but the configuration, which from then on is the new one;
        one log line says so. Without a filter the layers of the first time stay; with one it must choose the same.

    Raises:
        ValueError: if ``process_group`` is None or lacks this rank, ``config`` names a rank outside it, the model has
            no layer that can be balanced, the group has one rank and the model's layers are of a larger one, or the
            model is converted again with another configuration while a balancer works by the old one, or with a filter
            that chooses other layers; for ``segments`` that do not fit the model, and ``shares`` that are no division
            of it, or that ``optimizer`` does not allow, as it sees whole matrices.
        TypeError: if a host adapter does not make a layer balanceable in place.
    """
    require_group(process_group)
    if not isinstance(config, BalanceConfig):
        raise ValueError(
            f"config must be a BalanceConfig, found {type(config).__name__}: use BalanceConfig(...), "
            "BalanceConfig.from_dict(...) or BalanceConfig.from_yaml(...)"
        )
    config.validate_group_size(group_size(process_group))
    wanted = _checked_shares(config.shares if shares is None else shares, group_size(process_group))
    if group_size(process_group) == 1:
        _require_no_other_group(model)
        logger.info("convert: the process group has one rank, so there is nothing to balance")
        return model
    if layers := balanced_layers(model):
        if module_filter_fn is not None:
            _require_same_choice(model, layers, process_group, module_filter_fn)
        _configure_again(layers, config)
        if segments or shares is not None:
            raise ValueError(
                "convert: the model is converted already: its segments stay as they are, and a balancer's move(shares) "
                "divides them anew"
            )
        return model

    left_alone: dict[str, str] = {}
    filtered: list[str] = []
    error: Exception | None = None
    try:
        left_alone, filtered = _swap_layers(model, process_group, module_filter_fn)
        layers = balanced_layers(model)
        if not layers:
            raise ValueError(_nothing_to_convert(model, left_alone, filtered))
        for layer in layers.values():
            layer.configuration = config
        _find_segments(model, layers, process_group, config, segments)
    except Exception as raised:  # other ranks may be about to divide
        error = raised
    try:
        if error is not None and wanted == "even":
            raise error
        if wanted != "even":
            device = next((one.device for one in model.parameters()), torch.device("cpu"))
            require_same_segments(owned_segments(layers), wanted, error, process_group, device)
            _divide(model, layers, process_group, config, wanted, optimizer)
    except Exception:
        _take_back(balanced_layers(model))
        raise
    guard_save_pretrained(unwrap(model))
    logger.info(
        "convert: %d layers can be balanced, %d were left alone, %d were left out by module_filter_fn",
        len(layers),
        len(left_alone),
        len(filtered),
    )
    return model


def _take_back(layers: Mapping[str, BalancedLinear]) -> None:
    """After an error: the model may be converted again, in the right way."""
    if all(segment.owned.is_even for segment in owned_segments(layers)):
        for layer in layers.values():
            layer.is_converted, layer.configuration, layer.segment = False, None, None


def _find_segments(
    model: nn.Module,
    layers: Mapping[str, BalancedLinear],
    process_group: ProcessGroup,
    config: BalanceConfig,
    named: Sequence[Segment],
) -> None:
    """Tell every layer in which segment it lies."""
    if isinstance(named, Segment) or not all(isinstance(one, Segment) for one in named):
        raise ValueError(f"segments={named!r}: wanted is a list of zeroresize.Segment")
    found, staying_even = find_segments(unwrap(model), layers, group_size(process_group), named)
    found = _with_keyed_dropout(model, found, process_group, config, staying_even)
    for segment in found:
        for name in segment.layers:
            layers[name].segment = segment
    guard_modules(found)
    reasons: dict[str, list[str]] = {}
    for name, reason in staying_even.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        logger.info("convert: %d layers stay evenly divided (%s): %s", len(names), _first_of(names), reason)
    if staying_even and config.may_move:
        logger.warning(
            "convert: the units of %d of %d layers cannot move (%s); the lines of level INFO tell why",
            len(staying_even),
            len(layers),
            _first_of(list(staying_even)),
        )


def _with_keyed_dropout(
    model: nn.Module,
    segments: Sequence[OwnedSegment],
    process_group: ProcessGroup,
    config: BalanceConfig,
    staying_even: dict[str, str],
) -> list[OwnedSegment]:
    """The segments within which what is dropped does not depend on who owns a unit; of the others, why they stay even.

    Ranks that draw differently many random numbers would also drop different elements where all must drop the same.
    """
    if config.mode in MOVING_MODES:
        replica = group_ranks(process_group)[0]
        reasons = key_dropout(unwrap(model), segments, seed=mixed(config.seed, replica))
    else:
        reasons = {
            segment.name: f"in mode {config.mode!r} dropout between its layers stays as it is"
            for segment in segments
            if segment.has_other_dropout or any(getattr(one, "p", 0.0) for one, _ in segment.dropouts)
        }
    for segment in segments:
        if segment.name in reasons:
            staying_even |= dict.fromkeys(segment.layers, reasons[segment.name])
    return [segment for segment in segments if segment.name not in reasons]


def _checked_shares(shares: Any, num_ranks: int) -> tuple[float, ...] | str:
    if not isinstance(shares, str):
        return checked_shares(shares, num_ranks)
    if shares not in SHARE_CHOICES:
        raise ValueError(
            f"shares={shares!r} is not allowed: choose one of {list(SHARE_CHOICES)}, or give {num_ranks} numbers, one "
            "for each rank"
        )
    return shares


def _divide(
    model: nn.Module,
    layers: Mapping[str, BalancedLinear],
    process_group: ProcessGroup,
    config: BalanceConfig,
    shares: tuple[float, ...] | str,
    optimizer: Any,
) -> None:
    """Divide the units of all segments by ``shares``; collective."""
    if config.mode not in AWAY_MODES:
        raise ValueError(
            f"shares={shares!r} with mode={config.mode!r} is not allowed: units own by shares in the modes "
            f"{', '.join(map(repr, MOVING_MODES))} and 'off' only"
        )
    found = owned_segments(layers)
    if not found:
        raise ValueError(
            f"shares={shares!r}: no segment of the model is known to be divisible by units: name one by segments="
        )
    if isinstance(shares, str):
        if world_size() > group_size(process_group):
            raise ValueError(
                "shares='auto' is not allowed beside data parallelism, where all replicas must be divided alike and "
                "may measure differently: give the shares as numbers"
            )
        shares = measured_shares(layers, _meet_over(process_group, layers))
        logger.info("convert: by their speed the ranks take the shares %s", [round(share, 2) for share in shares])
    units = UnitsInForce(model, layers, optimizer, process_group, meet=_meet_over(process_group, layers))
    units.agree()
    if units.why_not_divisible is not None:
        raise ValueError(f"shares={list(shares)}: units cannot be divided so: {units.why_not_divisible}")
    units.move(shares)
    counts = "; ".join(f"{kind} {' : '.join(map(str, of_ranks))}" for kind, of_ranks in units.num_units.items())
    logger.info("convert: the ranks own by the shares %s, in whole units of all layers: %s", list(shares), counts)


def _meet_over(process_group: ProcessGroup, layers: Mapping[str, BalancedLinear]) -> Meet:
    return meet_over(process_group, next(iter(layers.values())).local_weight.device)


def balanced_layers(model: nn.Module) -> dict[str, BalancedLinear]:
    """The converted layers of ``model`` by name, in the order of the model."""
    return {
        name: module
        for name, module in unwrap(model).named_modules()
        if isinstance(module, BalancedLinear) and module.is_converted
    }


def require_same_configuration(layers: Mapping[str, BalancedLinear], config: BalanceConfig) -> None:
    """Check that the layers were converted with ``config``.

    Raises:
        ValueError: naming the keys that differ, with both values.
    """
    for name, layer in layers.items():
        if layer.configuration is not None and layer.configuration != config:
            raise ValueError(
                f"layer {name} was converted with another configuration: "
                f"{_difference(layer.configuration, config, 'in convert', 'here')}. Pass the same to both, or convert "
                "again with the new one first"
            )


def _configure_again(layers: Mapping[str, BalancedLinear], config: BalanceConfig) -> None:
    """Give layers that are converted already another configuration, unless one is at work."""
    known = next((layer.configuration for layer in layers.values() if layer.configuration != config), config)
    if known == config or known is None:
        logger.info("convert: the model is converted already, nothing was changed")
    elif any(layer.probes.holds(LayerTimer) for layer in layers.values()):
        raise ValueError(
            f"convert: a balancer works with another configuration ({_difference(known, config, 'there', 'here')}): "
            "close() it first"
        )
    else:
        told = _difference(known, config, "before", "now")
        logger.info("convert: the model is converted already, only its configuration was changed: %s", told)
    for layer in layers.values():
        layer.configuration = config


def _difference(one: BalanceConfig, other: BalanceConfig, of_one: str, of_other: str) -> str:
    """The keys that differ, with both values."""
    own, others = one.to_flat_dict(), other.to_flat_dict()
    return "; ".join(
        f"{key}={own[key]!r} {of_one}, {key}={others[key]!r} {of_other}" for key in own if own[key] != others[key]
    )


def _require_same_choice(
    model: nn.Module,
    layers: Mapping[str, BalancedLinear],
    process_group: ProcessGroup,
    module_filter_fn: ModuleFilter,
) -> None:
    """Check that the filter chooses the layers that are converted already."""
    chosen = {
        name
        for name, module, host in _parallel_layers(model)
        if module_filter_fn(module, name) and (name in layers or _why_left_alone(module, host, process_group) is None)
    }
    if chosen != set(layers):
        told = {
            "would be new": [name for name in chosen if name not in layers],
            "would be left out": [name for name in layers if name not in chosen],
        }
        raise ValueError(
            "convert: the model is converted already, and module_filter_fn chooses other layers: "
            f"{'; '.join(f'{_first_of(sorted(names))} {what}' for what, names in told.items() if names)}. Convert a "
            "model that is not converted yet with this filter, or this one without a filter"
        )


def _swap_layers(
    model: nn.Module, process_group: ProcessGroup, module_filter_fn: ModuleFilter | None
) -> tuple[dict[str, str], list[str]]:
    """Swap what can be swapped and mark it as converted.

    Returns:
        (the reasons for the others by layer name, names of those that the filter refuses).
    """
    left_alone: dict[str, str] = {}
    filtered: list[str] = []
    for name, module, host in _parallel_layers(model):
        if module_filter_fn is not None and not module_filter_fn(module, name):
            filtered.append(name)
            continue
        reason = _why_left_alone(module, host, process_group)
        if reason is not None:
            left_alone[name] = reason
            # A gathered classifier is usual; anything else a user would want to know.
            level = logging.INFO if reason == GATHERED else logging.WARNING
            logger.log(level, "convert: layer %s is left alone: %s", name, reason)
            continue
        layer = host.swap_layer(module)
        if layer is not module or not isinstance(module, BalancedLinear):
            raise TypeError(
                f"convert: the adapter {type(host).__name__} did not make layer {name} ({type(module).__name__}) a "
                "BalancedLinear in place: swap_layer must change the layer's class and return the same layer"
            )
        module.is_converted = True
    return left_alone, filtered


def _require_no_other_group(model: nn.Module) -> None:
    for name, module, _ in _parallel_layers(model):
        if group_size(module.process_group) > 1:
            raise ValueError(
                f"convert: process_group has one rank, and layer {name} is split over "
                f"{group_size(module.process_group)}: pass the tensor-parallel group"
            )


def _parallel_layers(model: nn.Module) -> Iterator[tuple[str, Any, HostAdapter]]:
    """Parallel linear layers of all hosts: name, layer, and the adapter that knows it."""
    for name, module in unwrap(model).named_modules():
        host = host_of(module)
        if host is not None:
            yield name, module, host


def _why_left_alone(module: Any, host: HostAdapter, process_group: ProcessGroup) -> str | None:
    reason = why_no_whole_weight(module) or host.why_left_alone(module)
    if reason is not None:
        return reason
    if getattr(module, "gather_output", False):
        return GATHERED
    if not same_ranks(module.process_group, process_group):
        return "it belongs to another process group"
    if module.weight.shape[1] < 2:
        return "it has fewer than two input features"
    return None


def _nothing_to_convert(model: nn.Module, left_alone: Mapping[str, str], filtered: list[str]) -> str:
    found = "; ".join(f"{name}: {reason}" for name, reason in left_alone.items()) or "none"
    refused = f". module_filter_fn left out {_first_of(filtered)}" if filtered else ""
    sharded = {name: type(one).__name__ for name, one in unwrap(model).named_parameters() if is_sharded(one)}
    if sharded:
        return (
            f"convert: the model has no layer that can be balanced, and {len(sharded)} of its parameters are "
            f"{', '.join(sorted(set(sharded.values())))}s, as parallelize_module and fully_shard make them: "
            f"{_first_of(list(sharded))}. A DTensor can only be divided evenly. In place of parallelize_module split "
            "the nn.Linear layers by zeroresize.ColumnParallelLinear.from_linear and RowParallelLinear.from_linear; "
            "give the model to fully_shard after convert only. Parallel layers that were left alone: "
            f"{found}{refused}"
        )
    return (
        f"convert: the model has no layer that can be balanced. Wanted are {known_kinds()}, or layers of a host that "
        f"zeroresize.integrations.register_host was given. Parallel layers found but left alone: {found}{refused}"
    )


def _first_of(names: list[str]) -> str:
    return f"{', '.join(names[:4])}{', …' if names[4:] else ''}"
