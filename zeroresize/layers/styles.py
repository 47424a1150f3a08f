"""Styles for ``torch.distributed.tensor.parallel.parallelize_module`` that make layers of this package.

They read and write what torch's own ``ColwiseParallel`` and ``RowwiseParallel`` do by default, with parameters that are
plain tensors, this rank's shards, in place of DTensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel.style import ParallelStyle

from zeroresize.comm.collectives import broadcast, group_size, message_device, require_group
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.linear import ColumnParallelLinear, RowParallelLinear, require_divisible


class ColwiseParallel(ParallelStyle):
    """Makes an ``nn.Linear`` a :class:`~zeroresize.ColumnParallelLinear`, in place, that counts as converted::

        plan = {"up": zr.ColwiseParallel(), "down": zr.RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        optimizer = torch.optim.AdamW(model.parameters())  # afterwards: the layers have new parameters
        balancer = zr.Balancer(model, optimizer)

    The module stays the same object, with its name, hooks and mode; its parameters become this rank's rows, of rank 0's
    tensors (``src_data_rank=``; None takes those that this rank has). On the meta device shapes only change.

    Args:
        input_layouts: of x: replicated, the default, is allowed only.
        output_layouts: of y: divided on the last dimension by default; ``Replicate()`` gathers the whole y on every
            rank, and leaves the layer out of balancing.
        use_local_output: True is allowed only.

    Raises:
        ValueError: from ``parallelize_module`` for a module that is no ``nn.Linear``, has a forward of its own or is
            split already, features that the ranks do not divide, and a mesh of several dimensions; from here for other
            layouts.
    """

    def __init__(self, *, input_layouts: Any = None, output_layouts: Any = None, use_local_output: bool = True) -> None:
        super().__init__()
        _require_layout(self, "input_layouts", _kind_of(input_layouts, "replicated"), ("replicated",))
        kind = _kind_of(output_layouts, "divided")
        _require_layout(self, "output_layouts", kind, ("divided", "replicated"))
        _require_local_output(self, use_local_output)
        self._gathers_output = kind == "replicated"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        process_group = _checked(self, module, device_mesh, "out_features")
        whole = _of_source(module, process_group, getattr(self, "src_data_rank", 0))
        layer = ColumnParallelLinear.from_linear(whole, process_group=process_group, gather_output=self._gathers_output)
        return _become(module, layer, is_converted=not self._gathers_output)


class RowwiseParallel(ParallelStyle):
    """Makes an ``nn.Linear`` a :class:`~zeroresize.RowParallelLinear`, in place; see :class:`ColwiseParallel`.

    Its weight becomes this rank's columns; its bias stays whole, and is added once.

    Args:
        input_layouts: of x: divided on the last dimension by default; with ``Replicate()`` the layer splits a whole x.
        output_layouts: of y: replicated, the default, is allowed only.
        use_local_output: True is allowed only.

    Raises:
        ValueError: as of :class:`ColwiseParallel`.
    """

    def __init__(self, *, input_layouts: Any = None, output_layouts: Any = None, use_local_output: bool = True) -> None:
        super().__init__()
        kind = _kind_of(input_layouts, "divided")
        _require_layout(self, "input_layouts", kind, ("divided", "replicated"))
        _require_layout(self, "output_layouts", _kind_of(output_layouts, "replicated"), ("replicated",))
        _require_local_output(self, use_local_output)
        self._reads_slice = kind == "divided"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        process_group = _checked(self, module, device_mesh, "in_features")
        whole = _of_source(module, process_group, getattr(self, "src_data_rank", 0))
        layer = RowParallelLinear.from_linear(whole, process_group=process_group, input_is_parallel=self._reads_slice)
        return _become(module, layer, is_converted=True)


#: What a subclass of ``nn.Linear`` may have and still compute the same as an ``nn.Linear``, once it is made.
_LOSES_NOTHING = {
    *("__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__annotate_func__", "__parameters__"),
    *("__constants__", "__firstlineno__", "__static_attributes__"),
}


def _kind_of(layout: Any, default: str) -> str:
    """What a placement of torch, or its absence, means here; its text where that is nothing."""
    if layout is None:
        return default
    if not isinstance(layout, Placement):
        return repr(layout)
    if layout.is_replicate():
        return "replicated"
    return "divided" if layout.is_shard(-1) else repr(layout)


def _require_layout(style: ParallelStyle, key: str, kind: str, allowed: tuple[str, ...]) -> None:
    if kind not in allowed:
        texts = {"replicated": "Replicate()", "divided": "Shard(-1)"}
        raise ValueError(
            f"{type(style).__name__}({key}={texts.get(kind, kind)}) is not allowed: wanted is "
            f"{' or '.join(texts[one] for one in allowed)}. Sequence parallelism is not known here"
        )


def _require_local_output(style: ParallelStyle, use_local_output: bool) -> None:
    if not use_local_output:
        raise ValueError(
            f"{type(style).__name__}(use_local_output=False) is not allowed: its layers return plain tensors"
        )


def _checked(style: ParallelStyle, module: nn.Module, device_mesh: DeviceMesh, features: str) -> ProcessGroup:
    """The group of the mesh; before anything has changed it is an error if the style does not fit the module."""
    name = type(style).__name__
    if not isinstance(module, nn.Linear):
        split = ", which is split already" if isinstance(module, BalancedLinear) else ""
        raise ValueError(f"{name} needs a whole torch.nn.Linear, found a {type(module).__name__}{split}")
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        raise ValueError(
            f"{name} needs a plain torch.nn.Linear, found a {type(module).__name__} with a forward of its own"
        )
    classes = type(module).__mro__[: type(module).__mro__.index(nn.Linear)]
    lost = sorted({added for each in classes for added in vars(each)} - _LOSES_NOTHING)
    if lost:
        raise ValueError(
            f"{name} needs a plain torch.nn.Linear, found a {type(module).__name__}: its {', '.join(lost)} would be "
            "lost"
        )
    named = (*module.named_parameters(), *module.named_buffers(), *module.named_children())
    others = {part for part, _ in named} - {"weight", "bias"}
    if others:
        raise ValueError(
            f"{name} needs a plain torch.nn.Linear, found one that holds {', '.join(sorted(others))} beside its weight "
            "and bias"
        )
    if any(hasattr(parameter, "placements") for parameter in module.parameters()):
        raise ValueError(f"{name} needs a whole torch.nn.Linear, found one of DTensors, which is split already")
    process_group = require_group(device_mesh)
    require_divisible(module, features, process_group, name)
    return process_group


def _of_source(module: Any, process_group: ProcessGroup, source: int | None) -> nn.Linear:
    """The whole linear layer as rank ``source`` of the group has it; collective, unless that is None."""
    if source is None or group_size(process_group) == 1 or module.weight.device.type == "meta":
        linear: nn.Linear = module
        return linear
    whole = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
    whole.weight = _broadcast(module.weight, process_group, source)
    if module.bias is not None:
        whole.bias = _broadcast(module.bias, process_group, source)
    return whole.train(module.training)


def _broadcast(parameter: Tensor, process_group: ProcessGroup, source: int) -> nn.Parameter:
    message = parameter.detach().to(message_device(process_group, parameter.device), copy=True).contiguous()
    broadcast(message, source, process_group)
    return nn.Parameter(message.to(parameter.device), requires_grad=parameter.requires_grad)


def _become(module: nn.Module, layer: ColumnParallelLinear | RowParallelLinear, *, is_converted: bool) -> nn.Module:
    """``module``, an ``nn.Linear``, turned into ``layer``: ``parallelize_module`` drops what a style returns."""
    every_module_has = vars(nn.Module())
    made: Any = module
    made.__class__ = type(layer)
    vars(made).update({name: value for name, value in vars(layer).items() if name not in every_module_has})
    made.weight = layer.weight
    if made.bias is not None:
        made.bias = layer.bias
    made.prepare_balancing()
    made.is_converted = is_converted and group_size(made.process_group) > 1
    return module
