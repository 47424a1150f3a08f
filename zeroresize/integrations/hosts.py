"""Whose parallel linear layers can be balanced: a registry of adapters, one a library, to which a user can add.

A host is the library that a model's parallel layers come from. Its layers are balanced in place, so that they keep
their parameters, names and hooks.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Protocol

from torch import nn
from torch.distributed import ProcessGroup

from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.host_forward import HostForwardLayer
from zeroresize.utils.checked import checked
from zeroresize.utils.torch_private import is_tensor_of_tensors

logger = logging.getLogger(__name__)

#: Why a layer is left alone that gathers its output, or makes logits: no fault, since nothing of it could be balanced.
GATHERED, VOCABULARY = "gather_output=True", "it is a vocabulary head"


class HostAdapter(Protocol):
    """Tells ``zeroresize.convert`` what it must know of a library's parallel linear layers.

    It may have a method ``process_group_of`` and an attribute ``vocabulary_heads``, too: see :class:`SwappedClasses`;
    and ``moves_only``, True where layers go on to compute by their host's own forward: :class:`HostForwardClasses`.

    Attributes:
        kinds: which layers it can balance, as error messages name them.
    """

    @property
    def kinds(self) -> str: ...

    def is_parallel_linear(self, module: nn.Module) -> bool:
        """Tell whether ``module`` is a parallel linear layer of this library, one that can be balanced or not."""

    def why_left_alone(self, module: Any) -> str | None:
        """Tell why a parallel linear layer must stay as it is, for a log line; None if it can be balanced."""

    def swap_layer(self, module: Any) -> Any:
        """Make ``module`` a :class:`BalancedLinear` in place (by its class), and return it; one that is, stays."""


def process_group_of(host: HostAdapter, module: Any) -> ProcessGroup:
    """Return the tensor-parallel group of a layer that ``host`` knows: its ``process_group``, unless the adapter says
    another way by a method ``process_group_of``.
    """
    ask = None if isinstance(module, BalancedLinear) else getattr(host, "process_group_of", None)
    group: ProcessGroup = module.process_group if ask is None else ask(module)
    return group


@checked()
class SwappedClasses:
    """Adapts a host whose layers are balanced by giving them another class.

    Args:
        classes: for every class of the host, a subclass of it and of ``BalancedLinear`` whose forward calls
            ``column_products`` or ``row_products``.
        why_left_alone: the reason why a layer of one of these classes must stay as it is, None if it can be balanced.
        process_group_of: the tensor-parallel group of such a layer, where that is not its attribute ``process_group``:
            ``lambda layer: layer.tp_group``. A layer that is swapped has it as ``process_group`` from then on.
        vocabulary_heads: what layers that make logits are called in their modules, such as ``["output_layer"]``: they
            stay as they are.
    """

    def __init__(
        self,
        classes: Mapping[type, type],
        why_left_alone: Callable[[Any], str | None] = lambda module: None,
        *,
        process_group_of: Callable[[Any], ProcessGroup] | None = None,
        vocabulary_heads: Sequence[str] = (),
    ) -> None:
        for host_class, balanced_class in classes.items():
            if not issubclass(balanced_class, BalancedLinear) or not issubclass(balanced_class, host_class):
                raise ValueError(
                    f"{balanced_class.__name__} must be a subclass of BalancedLinear and of {host_class.__name__}"
                )
            if getattr(balanced_class, "forward", None) is getattr(host_class, "forward", None):
                raise ValueError(
                    f"{balanced_class.__name__} has the forward of {host_class.__name__}: it must have its own, which "
                    "calls column_products or row_products"
                )
        self._classes, self._why_left_alone = dict(classes), why_left_alone
        self.process_group_of, self.vocabulary_heads = process_group_of, tuple(vocabulary_heads)

    @property
    def kinds(self) -> str:
        return " / ".join(host_class.__qualname__ for host_class in self._classes)

    def is_parallel_linear(self, module: nn.Module) -> bool:
        return isinstance(module, tuple(self._classes))

    def why_left_alone(self, module: Any) -> str | None:
        if getattr(module, "gather_output", False):
            return GATHERED
        if type(module) not in self._classes and type(module) not in self._classes.values():
            return f"{type(module).__name__} is a subclass with a forward of its own"
        return self._why_left_alone(module)

    def swap_layer(self, module: Any) -> Any:
        if type(module) in self._classes:
            if self.process_group_of is not None:
                module.process_group = self.process_group_of(module)
            module.__class__ = self._classes[type(module)]
            module.prepare_balancing()
        return module


#: Which dimension of each tensor holds units, and in how many parts; None where all ranks hold the same.
UnitDims = Mapping[str, int | tuple[int, int] | None]
_NONE: Mapping[type, UnitDims] = MappingProxyType({})


@checked()
class HostForwardClasses(SwappedClasses):
    """Adapts a host whose layers go on to compute by their own forward, such as fused or quantised ones.

    Their units move, and mode ``exact`` decides by how long whole forwards and backwards of the layers take. Nothing is
    lent or dropped: other modes than ``exact`` and ``off`` are an error that names the layer.

    Each class comes with all of its parameters and buffers by name, which may be of any number of dimensions, such as
    scales of output channels beside weights: with the dimension that ranks have divided; with (dimension, parts) where
    that has several equal parts one after another, each with rows of every unit; or with None where all ranks hold the
    same. By the first one's dimension the layer has output features, or a row-parallel one input features.

    Args:
        columns: classes of column-parallel layers: ``{Fused: {"weight": 0, "scale": 0, "bias": 0}}``.
        rows: of row-parallel ones: ``{FusedRow: {"weight": 1, "scale": None, "bias": None}}``.
        segments: of layers that are a segment each, which read what all ranks have and return the sum over the ranks:
            ``{FusedMlp: {"down": 1, "gate_up": (0, 2)}}``. Name these by ``zr.Segment(column=[], row="mlp", ...)``.
        why_left_alone, process_group_of, vocabulary_heads: as of :class:`SwappedClasses`.
    """

    moves_only = True

    def __init__(
        self,
        columns: Mapping[type, UnitDims] = _NONE,
        rows: Mapping[type, UnitDims] = _NONE,
        segments: Mapping[type, UnitDims] = _NONE,
        why_left_alone: Callable[[Any], str | None] = lambda module: None,
        *,
        process_group_of: Callable[[Any], ProcessGroup] | None = None,
        vocabulary_heads: Sequence[str] = (),
    ) -> None:
        self._dims = {**columns, **rows, **segments}
        classes = {
            host_class: host_forward_class(
                host_class, dims, is_column=host_class in columns, is_segment=host_class in segments
            )
            for host_class, dims in self._dims.items()
        }
        super().__init__(classes, why_left_alone, process_group_of=process_group_of, vocabulary_heads=vocabulary_heads)

    def why_left_alone(self, module: Any) -> str | None:
        reason = super().why_left_alone(module)
        is_known = reason is not None or isinstance(module, HostForwardLayer)
        return reason if is_known else _why_not_of_units(module, self._dims[type(module)])


def host_forward_class(
    host_class: type, dims: UnitDims, base: type = HostForwardLayer, *, is_column: bool = False, is_segment: bool = True
) -> type:
    """Return a subclass of ``host_class`` that measures its forward, and whose units lie in its tensors by ``dims``."""
    of_units = {name: (at, None) if isinstance(at, int) else at for name, at in dims.items() if at is not None}
    if not of_units:
        raise ValueError(f"{host_class.__name__}: no tensor is said to hold units: {dict(dims)}")
    attributes: dict[str, Any] = {
        "host_class": host_class,
        "is_column_parallel": is_column,
        "is_segment": is_segment,
        "dims_by_host": {name: dim for name, (dim, _) in of_units.items()},
        "unit_parts": {name: parts for name, (_, parts) in of_units.items() if parts is not None},
    }
    if "weight" not in dims:
        attributes["weight"] = property(attrgetter(next(iter(of_units))))
    return type(f"Moved{host_class.__name__}", (base, host_class), attributes)


def _why_not_of_units(module: nn.Module, dims: UnitDims) -> str | None:
    """Which tensor of a layer cannot be attributed to units by ``dims``; None if all can."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        at, shape = dims.get(name), tuple(tensor.shape)
        if name not in dims:
            rule = "say which dimension holds them, or None where all ranks hold the same"
            return f"{name}, of shape {shape}, is not attributed to units: its adapter must {rule}"
        if at is not None and is_tensor_of_tensors(tensor):
            return f"{name} is a {type(tensor).__name__}, which holds its numbers in other tensors that would not move"
        dim, parts = (at, 1) if isinstance(at, int) else at or (0, 1)
        if at is not None and (not 0 <= dim < len(shape) or shape[dim] % parts or not shape[dim]):
            return f"{name}, of shape {shape}, has no dimension {dim} of {parts} equal parts"
    return None


class _OwnLayers:
    """This package's layers, and any other that is a ``BalancedLinear`` from the start."""

    kinds = (
        "zeroresize.ColumnParallelLinear / RowParallelLinear (made by from_linear, or by parallelize_module with "
        "zeroresize.ColwiseParallel / RowwiseParallel)"
    )

    def is_parallel_linear(self, module: nn.Module) -> bool:
        return isinstance(module, BalancedLinear)

    def why_left_alone(self, module: Any) -> str | None:
        return None

    def swap_layer(self, module: Any) -> Any:
        return module


class _OnceImported:
    """An adapter in a module that is imported only where its library is in use already."""

    def __init__(self, library: str, adapter_module: str, kinds: str) -> None:
        self._library, self._adapter_module, self.kinds = library, adapter_module, kinds

    def is_parallel_linear(self, module: nn.Module) -> bool:
        adapter = self._adapter if self._library in sys.modules else None
        return adapter is not None and bool(adapter.is_parallel_linear(module))

    @cached_property
    def _adapter(self) -> Any:
        """The adapter; None where its library is not as it must be, which a log line says once."""
        try:
            return importlib.import_module(self._adapter_module)
        except (ImportError, AttributeError) as error:
            logger.warning("%s are left alone, as their adapter cannot be imported: %s", self.kinds, error)
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


#: The first that knows a layer is asked about it.
_hosts: list[Any] = [
    _OwnLayers(),
    _OnceImported(  # importing it takes ten seconds
        "colossalai",
        "zeroresize.integrations.colossalai",
        "Colossal-AI's Linear1D_Col / Linear1D_Row and its fused layers (convert after booster.boost or "
        "ShardFormer.optimize)",
    ),
    _OnceImported(
        "megatron.core.tensor_parallel.layers",
        "zeroresize.integrations.megatron",
        "Megatron-Core's ColumnParallelLinear / RowParallelLinear",
    ),
    _OnceImported(
        "deepspeed.module_inject.layers",
        "zeroresize.integrations.deepspeed",
        "DeepSpeed's LinearLayer / LinearAllreduce that AutoTP has split (convert the engine)",
    ),
    _OnceImported(
        "transformers.distributed.tensor_parallel",
        "zeroresize.integrations.transformers_experts",
        "routed experts that plans of transformers 5 have split",
    ),
    _OnceImported(
        "torch.distributed.tensor",
        "zeroresize.integrations.dtensor",
        "torch.nn.Linear that torch's ColwiseParallel / RowwiseParallel have split",
    ),
]


def register_host(adapter: HostAdapter) -> None:
    """Let ``zeroresize.convert`` balance the layers that ``adapter`` knows, too; it is asked before all others.

    Call alike on every rank, before ``convert``. See docs/adding_a_host.md.

    Raises:
        TypeError: naming what the adapter lacks.
    """
    wanted = ("kinds", "is_parallel_linear", "why_left_alone", "swap_layer")
    missing = [name for name in wanted if not hasattr(adapter, name)]
    if missing:
        raise TypeError(f"{type(adapter).__name__} is no host adapter, since it has no {', '.join(missing)}")
    if adapter not in _hosts:
        _hosts.insert(0, adapter)


def host_of(module: nn.Module) -> HostAdapter | None:
    """Return the adapter that knows this kind of layer; None for a module that is no parallel linear layer."""
    return next((host for host in _hosts if host.is_parallel_linear(module)), None)


def known_kinds() -> str:
    """Name the layers that can be balanced, for error messages."""
    return " or ".join(host.kinds for host in _hosts)
