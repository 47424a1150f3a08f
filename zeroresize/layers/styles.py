"""Styles for ``torch.distributed.tensor.parallel.parallelize_module`` that make layers which can be balanced.

They read and write what torch's own ``ColwiseParallel`` and ``RowwiseParallel`` do, and like theirs the parameters are
DTensors. A model that torch's styles have split is the same once ``zeroresize.convert`` has seen it.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel.style import ParallelStyle

from zeroresize.comm.collectives import group_ranks, group_size, require_group
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.dtensor_linear import LinearLayouts, become_dtensor_linear, split_over
from zeroresize.layers.linear import num_units_to_divide
from zeroresize.layers.splitting import Parts, checked_parts, keep_ties, require_split_alike, why_no_plain_linear
from zeroresize.plan.ownership import home_counts
from zeroresize.utils.checked import checked, integer
from zeroresize.utils.torch_private import is_dtensor


class _LinearStyle(ParallelStyle):
    """Holds what both styles have in common."""

    _is_column: bool
    _allowed: dict[str, tuple[str, ...]]

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        parts: Parts = 1,
        unit_size: int | None = None,
    ) -> None:
        super().__init__()
        self._parts, self._unit_size = parts, unit_size
        self._x: Placement = self._checked("input_layouts", input_layouts)
        self._y: Placement = self._checked("output_layouts", output_layouts)
        self._use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = type(self).__name__
        if not isinstance(module, nn.Linear):
            split = ", which is split already" if isinstance(module, BalancedLinear) else ""
            raise ValueError(f"{style} needs a whole torch.nn.Linear, found a {type(module).__name__}{split}")
        if any(map(is_dtensor, module.parameters())):
            raise ValueError(f"{style} needs a whole torch.nn.Linear, found one of DTensors, which is split already")
        if (why := why_no_plain_linear(module)) is not None:
            raise ValueError(f"{style} needs a plain torch.nn.Linear, found {why}")
        process_group = require_group(device_mesh)
        features = "out_features" if self._is_column else "in_features"
        of_units, size = self._unit_size, getattr(module, features)
        num_shares = num_units_to_divide(module, features, self._parts, of_units, process_group, style)
        parts = checked_parts(self._parts, size, num_shares, style, "units" if of_units else "ranks")
        num_ranks = group_size(process_group)
        home = home_counts(num_shares, num_ranks) if num_shares % num_ranks else ()
        gathers = self._is_column and self._y.is_replicate()
        stays_local = self._use_local_output and not gathers if self._is_column else self._x.is_shard(-1)
        if (len(parts) > 1 or home) and not stays_local:
            raise ValueError(
                f"{style}: parts={self._parts!r}, unit_size={of_units} needs plain tensors that stay divided: "
                "DTensors, or gathered ones, would have the parts in another order, or other numbers of features a rank"
            )
        layouts = LinearLayouts(device_mesh, self._x, self._y, self._use_local_output)
        source = getattr(self, "src_data_rank", 0)
        wholes = dict(module.named_parameters(recurse=False))
        division = self._is_column, home, tuple(parts), *group_ranks(process_group)
        require_split_alike(module, wholes, division)
        refused = split_over(module, layouts, parts, home, is_column=self._is_column, source=source)
        layer = become_dtensor_linear(module, layouts, is_column=self._is_column, division=home)
        layer.parts, layer.refused_at_home = parts, refused
        keep_ties(module, wholes, module, division)
        layer.is_converted = not gathers and group_size(process_group) > 1
        return module

    def _checked(self, key: str, layout: Placement | None) -> Placement:
        """A placement, or the default where there is none."""
        allowed = self._allowed[key]
        if layout is None:
            layout = Replicate() if allowed[0] == "Replicate()" else Shard(-1)
        kind = _kind_of(layout)
        if kind not in allowed:
            wanted = " or ".join(text if text != "Shard" else "Shard(dim) of a sequence" for text in allowed)
            raise ValueError(f"{type(self).__name__}({key}={layout!r}) is not allowed: wanted is {wanted}")
        return layout


def _kind_of(layout: Placement) -> str:
    """What a placement means to a style; nothing for other placements."""
    if layout.is_replicate():
        return "Replicate()"
    if layout.is_shard(-1):
        return "Shard(-1)"
    return "Shard" if layout.is_shard() else ""


@checked(unit_size=integer(1))
class ColwiseParallel(_LinearStyle):
    """Splits an ``nn.Linear`` by its output features, in place, and makes it a layer that can be balanced::

        plan = {"up": zr.ColwiseParallel(), "down": zr.RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        optimizer = torch.optim.AdamW(model.parameters())  # afterwards: the layers have new parameters
        balancer = zr.Balancer(model, optimizer)

    The module stays the same object, with its name, hooks and mode; its parameters become DTensors, of rank 0's tensors
    (``src_data_rank=``; None takes those that this rank has).

    Args:
        input_layouts: of an x that is no DTensor: replicated by default; ``Shard(1)`` is a sequence that the layer
            gathers.
        output_layouts: of y: divided on the last dimension by default; ``Replicate()`` gathers the whole y on every
            rank, and leaves the layer out of balancing.
        use_local_output: whether y is a plain tensor. A DTensor, with False, keeps the layer's units evenly divided.
        parts: of a packed layer, such as q, k and v in one: how many equal parts its output features are, or how many
            features each has, ``(q_rows, k_rows, v_rows)``. Each is split by itself, and y is this rank's share of
            every part, one after the other. ``full_tensor()`` of equal parts has the layout of the undivided layer; of
            others it is an error. So is ``dcp.save`` of either but by ``zeroresize.sharded_state_dict``.
        unit_size: how many output features are one unit, such as a head: ranks hold whole units, the first ones one
            more where their number does not divide them: 3 heads on 2 ranks are 2 and 1. ``full_tensor()`` and
            ``dcp.save`` are errors then, as of parts. Of parts of different sizes it is the unit of the smallest one.
            None for equally many features on every rank.

    Raises:
        ValueError: from ``parallelize_module`` for a module that is no ``nn.Linear``, has a forward of its own or is
            split already, features or parts that the ranks, or units, do not divide, and a mesh of several dimensions;
            from here for other layouts.
    """

    _is_column = True
    _allowed = {"input_layouts": ("Replicate()", "Shard"), "output_layouts": ("Shard(-1)", "Replicate()")}  # noqa: RUF012


@checked(unit_size=integer(1))
class RowwiseParallel(_LinearStyle):
    """Splits an ``nn.Linear`` by its input features, in place; see :class:`ColwiseParallel`.

    Its bias stays whole.

    Args:
        input_layouts: of an x that is no DTensor: divided on the last dimension by default; with ``Replicate()`` the
            layer splits a whole x, and its units stay evenly divided.
        output_layouts: of y: replicated by default; ``Shard(1)`` is a sequence of which each rank gets its part.
        use_local_output: whether y is a plain tensor, and no DTensor.
        parts: of a layer that reads this rank's share of several parts, one after the other; as of
            :class:`ColwiseParallel`, of its input features.
        unit_size: how many input features are one unit; as of :class:`ColwiseParallel`.

    Raises:
        ValueError: as of :class:`ColwiseParallel`.
    """

    _is_column = False
    _allowed = {"input_layouts": ("Shard(-1)", "Replicate()"), "output_layouts": ("Replicate()", "Shard")}  # noqa: RUF012
