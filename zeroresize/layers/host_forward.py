"""Layers that compute by their host's own forward, such as fused or quantised ones: nothing of it is lent or dropped.

Their units move all the same. What they compute is measured around whole forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from zeroresize.comm.collectives import group_size
from zeroresize.kernels.probe import Probes
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.local_parts import local_in_graph, local_of
from zeroresize.layers.segment_draws import follow_draws
from zeroresize.utils.torch_private import call_at_end_of_backward, parameters_of


class HostForwardLayer(BalancedLinear):
    """Measures the layer of a host; mixed into its class, whose forward it calls.

    Attributes:
        host_class: its class in the host.
        dims_by_host: what :attr:`unit_dims` are where the layer has all tensors. The first one tells N, or K of a
            row-parallel layer: how many entries it has along its dimension.
        unit_parts: in how many equal parts, each with rows of every unit, a tensor holds them; of others the segment
            tells.
    """

    moves_only = True
    host_class: ClassVar[type]
    dims_by_host: ClassVar[Mapping[str, int]]
    unit_parts: ClassVar[Mapping[str, int]]

    @property
    def unit_dims(self) -> Mapping[str, int]:
        return {name: dim for name, dim in self.dims_by_host.items() if getattr(self, name, None) is not None}

    @property
    def num_features(self) -> int:
        """N on this rank, or K of a row-parallel layer."""
        name, dim = next(iter(self.unit_dims.items()))
        return local_of(getattr(self, name)).shape[dim]

    @property
    def num_multiplied(self) -> int:
        """How many numbers of this rank a token is multiplied by."""
        return sum(local_of(getattr(self, name)).numel() for name in self.unit_dims)

    def prepare_balancing(self) -> None:
        """Note, besides, the work of a feature, which a rank without units could not tell."""
        vars(self)["work_of_feature"] = max(self.num_multiplied // self.num_features, 1)
        super().prepare_balancing()

    @property
    def local_weight(self) -> Tensor:
        """[N, K] without memory of its own: as much work as the layer's, by the features that ranks have divided."""
        like = local_of(getattr(self, next(iter(self.unit_dims))))
        is_wide = like.is_floating_point() and like.dtype.itemsize > 1  # else it is quantised
        shape = self.num_features, vars(self)["work_of_feature"]
        scalar = torch.zeros((), dtype=like.dtype if is_wide else torch.float32, device=like.device)
        return scalar.expand(shape if self.is_column_parallel else shape[::-1])

    @property
    def whole_sizes(self) -> set[int]:
        shapes = ((local_of(getattr(self, name)).shape, dim) for name, dim in self.unit_dims.items())
        return {size for shape, dim in shapes for at, size in enumerate(shape) if at != dim}

    @property
    def may_lend(self) -> bool:
        """Nothing of it."""
        return False

    def parts_of_tensor(self, name: str) -> tuple[int, ...]:
        """Return the parts of one of its tensors, of all ranks together, where it is in no segment."""
        size, parts = getattr(self, name).shape[self.unit_dims[name]], self.unit_parts.get(name, 1)
        return (size * group_size(self.process_group) // parts,) * parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the host's; it is given local parts where parameters are DTensors."""
        x = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        if torch.compiler.is_compiling() and self.training:
            self.is_compiled = True  # so that its units stay: a graph's layers are not measured
        if x is None or torch.compiler.is_compiling():
            return self._computed(args, kwargs)
        within = self.segment if self.is_segment else None
        if within is not None:
            follow_draws(within, is_column_parallel=True, device=x.device)
        self._forward_begins(x, self.training)
        if self.training:
            self._count(x)
        probes = self.probes if self.training else self.probes.of_evaluation()
        output = self._measured(probes, args, kwargs, x) if probes else self._computed(args, kwargs)
        if within is not None:
            follow_draws(within, is_column_parallel=False, device=x.device)
        return output

    def _measured(self, probes: Probes, args: Any, kwargs: Any, x: Tensor) -> Any:
        """Call the host's forward between marks, and let its backward set some, too."""
        operands = (x.new_empty(()).expand(x.shape),)  # its shape alone
        values = [*args, *kwargs.values()]
        learning = [number for number, each in enumerate(values) if isinstance(each, Tensor) and each.requires_grad]
        if tells_end := bool(learning) and torch.is_grad_enabled():
            marked = _BackwardEnds.apply(probes, operands, *(values[number] for number in learning))
            for number, each in zip(learning, marked, strict=True):
                values[number] = each
        probes.layer_begins(operands)
        output = self._computed(values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True)))
        probes.layer_ends(operands)

        def backward_begins(_: Tensor) -> None:
            probes.layer_begins(operands)
            if not tells_end:  # no gradient of an input does, as of a model's first layer
                call_at_end_of_backward(partial(probes.layer_ends, operands))

        several = output if isinstance(output, tuple | list) else [output]
        y = next((each for each in several if isinstance(each, Tensor) and each.grad_fn is not None), None)
        if y is not None:
            y.register_hook(backward_begins)
        return output

    def _given(self, name: str, parameter: Any) -> Any:
        """What the forward is given in place of one of its parameters."""
        return local_in_graph(parameter)

    def _computed(self, args: Any, kwargs: Any) -> Any:
        parameters: dict[str, Any] = parameters_of(self)  # type: ignore[arg-type]
        kept = {name: each for name, each in parameters.items() if each is not None}
        given = {name: self._given(name, each) for name, each in kept.items()}
        parameters.update(given)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            parameters.update({name: each for name, each in kept.items() if parameters.get(name) is given[name]})


class _BackwardEnds(torch.autograd.Function):
    """Hands inputs on, and notes that the layer's backward has ended where their gradients go."""

    @staticmethod
    def forward(ctx, probes: Probes, operands, *inputs):
        ctx.probes, ctx.operands = probes, operands
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in inputs)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.probes.layer_ends(ctx.operands)
        return None, None, *gradients
