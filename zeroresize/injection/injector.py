"""StragglerInjector: makes ranks of a tensor-parallel group or a pipeline slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup

from zeroresize.comm.collectives import group_rank, group_size, require_group
from zeroresize.injection.schedule import Schedule, Scope, checked_chi
from zeroresize.injection.slow_layers import SlowLayers
from zeroresize.injection.slow_ops import SlowOps
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.utils.checked import checked

if TYPE_CHECKING:
    from zeroresize.injection.slow_stage import SlowStage
    from zeroresize.pipeline.pipeline import Pipeline


@checked()
class StragglerInjector:
    """A context manager in which some ranks are slow.

    A straggler with skewness χ takes χ times as long for every product that it really executes, in training and in
    evaluation; the delay comes before the product's result can reach a collective. The rank sleeps (or spins, on
    a GPU's stream) after each product of the model's balanced layers; a model without any has the products of all its
    linear layers slowed, by :class:`SlowOps`. Convert the model first.

    Of a :class:`~zeroresize.pipeline.Pipeline`, given in place of a model and with its own group, a slow stage's layers
    take χ times as long as a whole, and so does the loss, whatever ``scope`` says; those that arrive by a move, too.

    Args:
        model: the model, already converted and on its device; or a pipeline.
        process_group: the tensor-parallel group, or the pipeline's; None is an error.
        chi: {rank within the group: χ}; ranks not named have χ = 1, and 0 means 1 (as in the paper's figures).
        schedule: instead of ``chi``, a callable (epoch, num_ranks) → {rank: χ}, such as ``round_robin()``.
        scope: ``"gemm"`` counts the matrix multiplications only (the paper's), ``"all"`` also
            the gathers and fills around them, as on a truly slow device. A model without balanced layers has every op
            slowed with ``"all"``.

    Raises:
        ValueError: naming the key, its value and what is allowed, for wrong arguments or a model without linear layers.
    """

    def __init__(
        self,
        model: nn.Module | Pipeline,
        *,
        process_group: ProcessGroup | DeviceMesh,
        chi: Mapping[int, float] | None = None,
        schedule: Schedule | None = None,
        scope: Scope = "gemm",
    ) -> None:
        process_group = require_group(process_group)
        self._rank, self._num_ranks = group_rank(process_group), group_size(process_group)
        self.scope = scope
        if (chi is None) == (schedule is None):
            raise ValueError(f"chi={chi!r}, schedule={schedule!r}: exactly one of them is needed")
        self._schedule = schedule
        self._chi = checked_chi(schedule(0, self._num_ranks) if schedule else chi, self._num_ranks)
        self._is_active = False
        self._slowness: SlowStage | SlowLayers | SlowOps
        if not isinstance(model, nn.Module):
            from zeroresize.injection.slow_stage import SlowStage  # which imports pipelines

            self._slowness = SlowStage(model)
        elif layers := [module for module in model.modules() if isinstance(module, BalancedLinear)]:
            self._slowness = SlowLayers(layers, self.scope)
        else:
            _require_linear_layers(model)
            self._slowness = SlowOps(scope=self.scope)

    @property
    def chi(self) -> dict[int, float]:
        """{rank: χ ≥ 1} in force; ranks not named have χ = 1."""
        return dict(self._chi)

    @property
    def num_products(self) -> int:
        """How many products of this rank were slowed, or forwards and backwards of a pipeline's layers."""
        return self._slowness.num_products

    @property
    def seconds_added(self) -> float:
        """How many seconds they were slowed by in all."""
        return self._slowness.seconds_added

    def set_epoch(self, epoch: int) -> None:
        """Let the schedule say who is slow from now on; without a schedule nothing changes.

        Raises:
            ValueError: if the schedule gives a rank or χ that is not allowed.
        """
        if self._schedule is not None:
            self.set_chi(self._schedule(epoch, self._num_ranks))

    def set_chi(self, chi: Mapping[int, float]) -> None:
        """Make exactly these ranks slow from now on. Call it on every rank alike; it communicates nothing.

        Raises:
            ValueError: for a rank or χ that is not allowed.
        """
        self._chi = checked_chi(chi, self._num_ranks)
        if self._is_active:
            self._slowness.chi = self._own_chi

    def __enter__(self) -> StragglerInjector:
        if self._is_active:
            raise RuntimeError("this StragglerInjector is active already")
        self._slowness.chi = self._own_chi
        self._slowness.__enter__()
        self._is_active = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_active = False
        self._slowness.__exit__(None, None, None)

    @property
    def _own_chi(self) -> float:
        return self._chi.get(self._rank, 1.0)


def _require_linear_layers(model: nn.Module) -> None:
    """Raise a ValueError for a model without linear layers: modules with a matrix that are not embeddings."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and "Embedding" not in type(module).__name__:
            return
    raise ValueError(f"model={type(model).__name__} has no linear layers, balanced or plain: nothing could be slowed")
