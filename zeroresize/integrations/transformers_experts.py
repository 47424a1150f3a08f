"""Routed experts of transformers 5 whose weights its plans have split: of every expert a rank holds the same neurons.

One unit is such a neuron of all experts of a layer. Read against 5.24: the style of the plan hands on and sums, and the
forward stays that of the class, in whatever ``experts_implementation``. That it is a sum over neurons, each of which is
computed by itself, is proven by numbers.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_size, require_group
from zeroresize.integrations.changed_modules import remembered_by
from zeroresize.integrations.hosts import host_forward_class
from zeroresize.integrations.known_modules import StaysEven, register_segments
from zeroresize.layers.host_forward import HostForwardLayer
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segment import Segment
from zeroresize.utils.torch_private import is_dividing, is_dtensor, parameters_of

#: The last is of all neurons together: styles leave it whole on every rank, where it must count once in all.
_GATE_UP, _DOWN, _BIAS = "gate_up_proj", "down_proj", "down_proj_bias"
#: The style that divides neurons, and the file of those that give whole experts to ranks.
_OF_NEURONS = "transformers.distributed.tensor_parallel", "MoeExpertsParallel"
_OF_EXPERTS = "transformers.distributed.expert_parallel"
#: Kernels want rows that begin at multiples of so many bytes, but for those of these implementations.
_ALIGNED_BYTES, _NOT_ALIGNED = 16, ("eager", "batched_mm", None)
#: How many units the proof by numbers has, which of them are computed apart, and for how many tokens.
_NUM_UNITS, _APART, _NUM_TOKENS = 3, ((0, 2), (1,)), 4

kinds, moves_only = "routed experts that plans of transformers 5 have split", True
_classes: dict[tuple[Any, ...], Any] = {}


class MovedExperts(HostForwardLayer):
    """Experts of one layer, which read all tokens and return the sum over the ranks."""

    has_dtensors = True
    style: Any

    @property
    def num_multiplied(self) -> int:
        """As of every such layer, of the experts that a token is given to."""
        whole = sum(getattr(self, name).numel() for name in self.unit_dims)
        num_used = getattr(getattr(self, "config", None), "num_experts_per_tok", 1)
        num_used = num_used if isinstance(num_used, int) else 1  # some have a list, by layer
        return whole * num_used // len(getattr(self, _DOWN)) // group_size(self.process_group)

    def is_sharded_further(self, parameter: Tensor) -> bool:
        """Tell whether it is a DTensor over more ranks than the layer's, as ``fully_shard`` makes it."""
        return is_dtensor(parameter) and parameter.device_mesh.ndim > 1  # type: ignore[attr-defined]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the style's, around the class's own."""
        mesh = _of_tensor_parallelism(getattr(self, _DOWN).device_mesh)
        args, kwargs = self.style.transform_inputs_pre_forward(self, args, kwargs, mesh)
        return self.style.transform_output_post_forward(self, super().forward(*args, **kwargs), mesh)

    def _given(self, name: str, parameter: Any) -> Any:
        if name == _BIAS:
            return _PartOfSum.apply(parameter, group_size(self.process_group))
        return super()._given(name, parameter)


class _PartOfSum(torch.autograd.Function):
    """What a rank adds to a sum of so many of a tensor that all ranks hold; its gradient is the whole one's."""

    @staticmethod
    def forward(ctx, whole, num_ranks):
        return whole / num_ranks

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def is_parallel_linear(module: nn.Module) -> bool:
    """Tell whether ``module`` is the experts of one layer, which a plan has split."""
    return isinstance(module, MovedExperts) or _style_of(module) is not None


def process_group_of(module: Any) -> ProcessGroup:
    """Return the group of the mesh over which a plan has split ``module``."""
    remembered = remembered_by(vars(module)["forward"])
    return require_group(_of_tensor_parallelism(remembered.get("mesh") or remembered["ep_mesh"]))


def why_left_alone(module: Any) -> str | None:
    """Tell why experts must stay as they are; None if their neurons can move."""
    if isinstance(module, MovedExperts):
        return None
    forward, dims = remembered_by(vars(module)["forward"]).get("original_forward"), _dims_of(module)
    if type(_style_of(module)).__module__ == _OF_EXPERTS or any(at and at[0] == 0 for at in dims.values()):
        return "whole experts lie on a rank (expert parallelism): only tp_plan='auto' divides them neuron by neuron"
    others = [each for child in module.children() for each in child.parameters()]
    if getattr(forward, "__func__", None) is not type(module).forward or next(iter(dims), None) != _DOWN or others:
        return f"it is not as transformers 5.24 has experts: its forward, its {_DOWN} or weights of its modules"
    for name, at in dims.items():
        if name == _BIAS and at is None:
            continue
        if at is None:
            return f"{name} is whole on every rank, and so would count as often as there are ranks"
        size, ranks = getattr(module, name).shape[at[0]], group_size(process_group_of(module))
        if size % (at[1] * ranks):
            return f"{name} has {size} entries in {at[1]} parts, which {ranks} ranks do not divide"
    num_parts = 2 if getattr(module, "is_concatenated", True) else 1
    if (at := dims.get(_GATE_UP)) is not None and at[1] != num_parts:
        return f"{_GATE_UP} is divided in {at[1]} parts, and its forward reads {num_parts}"
    return None


def swap_layer(module: Any) -> Any:
    """Make experts a layer whose neurons move, in place, and return them."""
    if not isinstance(module, MovedExperts):
        module.style, module.process_group, dims = _style_of(module), process_group_of(module), _dims_of(module)
        key = type(module), *dims.items()
        if key not in _classes:
            _classes[key] = host_forward_class(type(module), dims, MovedExperts)
            register_segments(type(module), _segment)
        del vars(module)["forward"]
        module.__class__ = _classes[key]
        module.prepare_balancing()
    return module


def _style_of(module: nn.Module) -> Any:
    """The style that has replaced the forward of experts; None of other modules."""
    style = remembered_by(vars(module).get("forward")).get("self")
    kind = type(style)
    return style if kind.__module__ == _OF_EXPERTS or (kind.__module__, kind.__name__) == _OF_NEURONS else None


def _of_tensor_parallelism(mesh: Any) -> Any:
    return mesh["tp"] if mesh.ndim > 1 else mesh


def _dims_of(module: nn.Module) -> dict[str, tuple[int, int] | None]:
    """The dimension of each weight that ranks have divided, and in how many parts; that which neurons enter first."""
    dims: dict[str, tuple[int, int] | None] = {}
    for name, each in sorted(parameters_of(module).items(), key=lambda item: item[0] != _DOWN):
        placement: Any = each.placements[-1] if is_dtensor(each) else None  # type: ignore[union-attr]
        parts = getattr(placement, "split_factor", 1)
        dims[name] = (placement.dim % each.ndim, parts) if is_dividing(placement) else None  # type: ignore[union-attr]
    return dims


def _segment(module: Any) -> Segment | Sequence[Segment]:
    """The neurons of all experts; several are one unit where kernels need that."""
    if not hasattr(module, "host_class"):  # it was left alone
        return ()
    proven, aligned = _computing(module), _ALIGNED_BYTES // local_of(getattr(module, _DOWN)).itemsize
    size = 1 if proven[0] in _NOT_ALIGNED or module.num_features % aligned else aligned
    _require_sum_over_units(module, size)

    def why_even() -> str | None:
        return None if _computing(module) == proven else "its experts_implementation was changed after convert"

    how: dict[str, Any] = {"head_size": 1, "kind": "neurons" if size == 1 else f"groups of {size} neurons"}
    return Segment([], module, size, on_change=lambda units: None, why_even=why_even, **how)  # no forward counts them


def _computing(module: Any) -> tuple[Any, ...]:
    """What the forward calls that may be changed: the implementation by its name, and itself, and the activation."""
    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    functions = sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS
    return name, functions.get(name, None), getattr(module, "act_fn", None)


def _require_sum_over_units(module: Any, size: int) -> None:
    """Check by numbers that what the forward returns, and dx, are sums over units of ``size`` neurons."""
    forward, parameters, kept = module.host_class.forward, parameters_of(module), dict(parameters_of(module))
    down = local_of(kept[_DOWN])  # type: ignore[arg-type]
    num_experts, width = module.down_proj.shape[0], down.shape[3 - module.unit_dims[_DOWN]]
    generator = torch.Generator(down.device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=down.device).to(down.dtype)

    weights, routing = dict[str, Tensor](), tuple[Tensor, ...]()
    for name, at in module.unit_dims.items():
        shape, parts = list(kept[name].shape), module.unit_parts[name]  # type: ignore[union-attr]
        rows = local_of(kept[name]).shape[at] * size // (parts * module.num_features)  # type: ignore[arg-type]
        shape[at : at + 1] = [parts, _NUM_UNITS, rows]
        weights[name] = drawn(*shape) / math.sqrt(width)
    x, towards = (drawn(_NUM_TOKENS * num_experts, width) for _ in range(2))  # in some classes sorted by experts
    x.requires_grad_()
    if len(inspect.signature(forward).parameters) > 2:
        experts = torch.arange(len(x), device=x.device)[:, None] % num_experts
        routing = experts, drawn(len(x), 1).abs()

    if kept.get(_BIAS) is not None:
        parameters[_BIAS] = torch.zeros_like(kept[_BIAS])  # type: ignore[arg-type, assignment]

    def results(units: Sequence[int]) -> Tensor:
        for name, at in module.unit_dims.items():
            parameters[name] = weights[name][(slice(None),) * (at + 1) + (list(units),)].flatten(at, at + 2)  # type: ignore[assignment]
        with torch.enable_grad():
            y = forward(module, x, *routing)
            (dx,) = torch.autograd.grad(y, x, towards)
        return torch.stack([y.detach(), dx])

    try:
        whole, total = results(range(_NUM_UNITS)), sum(map(results, _APART))
    except Exception as error:  # whatever its kernels make of the numbers
        raise StaysEven(f"its forward, computed with numbers: {type(error).__name__}: {error}") from error
    finally:
        parameters.update(kept)
    if not float((whole - total).abs().max()) <= math.sqrt(torch.finfo(down.dtype).eps) * float(whole.abs().max()):
        raise StaysEven("its forward, computed with numbers, is no sum over neurons")
