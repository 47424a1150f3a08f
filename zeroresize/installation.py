"""Carrying out a rank's plan: which columns of which layer, written to the layers and to the lineage table."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeroresize.lineage import LineageTable
from zeroresize.linear import BalancedLinear
from zeroresize.plan import LayerPlan
from zeroresize.policy.selector import ColumnSelector, Pruning


class PlanInstaller:
    """Turns this rank's pruning ratio into one ``LayerPlan`` a layer.

    Attributes:
        pruning: what is decided.
        pruned_share: share of this rank's product FLOPs that it drops, after rounding to columns and blocks (layers
            weighted by their matrices' sizes).
        layer_shares: share of every layer's columns that is pruned.
        in_force: what the next step does, ``pruning`` unless suspended.
    """

    def __init__(
        self, layers: Mapping[str, BalancedLinear], lineage: LineageTable, selector: ColumnSelector, imputation: str
    ) -> None:
        self._layers, self._lineage, self._selector, self._imputation = layers, lineage, selector, imputation
        self.pruning = self.in_force = Pruning()
        self.pruned_share = 0.0
        self.layer_shares = dict.fromkeys(layers, 0.0)
        self._epoch_in_force = 0

    def install(self, pruning: Pruning) -> None:
        """Prune the columns that the selector names in its epoch, from the next forward on."""
        self._carry_out(pruning)
        self.pruning = pruning
        self.layer_shares = {
            name: layer.plan.pruned_share if layer.plan else 0.0 for name, layer in self._layers.items()
        }
        self.pruned_share = self._share_of_work()

    def suspend(self) -> None:
        """Prune nothing until the next :meth:`install`, though it is decided."""
        self._carry_out(Pruning())

    def clear(self) -> None:
        """No plan in any layer."""
        self.install(Pruning())

    @property
    def share_in_force(self) -> float:
        """Share of this rank's product FLOPs that the next step drops."""
        return self.pruned_share if self.in_force == self.pruning else 0.0

    def _carry_out(self, pruning: Pruning) -> None:
        if (pruning, self._selector.epoch) == (self.in_force, self._epoch_in_force):
            return
        self.in_force, self._epoch_in_force = pruning, self._selector.epoch
        for name, columns in self._selector.pruned_columns(pruning).items():
            layer = self._layers[name]
            layer.plan = self._layer_plan(layer, columns.tolist())
            self._lineage.record(name, layer.plan)

    def _share_of_work(self) -> float:
        work = {name: layer.weight.numel() for name, layer in self._layers.items()}
        return sum(work[name] * share for name, share in self.layer_shares.items()) / max(sum(work.values()), 1)

    def _layer_plan(self, layer: BalancedLinear, columns: list[int]) -> LayerPlan | None:
        if not columns:
            return None
        pruned = torch.tensor(columns, dtype=torch.int64, device="cpu")
        return LayerPlan.from_pruned(pruned, layer.num_columns, layer.weight.device, self._imputation)
