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
        pruning: what is in force.
        pruned_share: share of this rank's product FLOPs that the plan drops, after rounding to columns and blocks
            (layers weighted by their matrices' sizes).
    """

    def __init__(
        self, layers: Mapping[str, BalancedLinear], lineage: LineageTable, selector: ColumnSelector, imputation: str
    ) -> None:
        self._layers, self._lineage, self._selector, self._imputation = layers, lineage, selector, imputation
        self._installed: tuple[Pruning, int] = (Pruning(), 0)
        self.pruning, self.pruned_share = Pruning(), 0.0

    def install(self, pruning: Pruning) -> None:
        """Prune the columns that the selector names in its epoch, from the next forward on."""
        self.pruning = pruning
        if (pruning, self._selector.epoch) == self._installed:
            return
        self._installed = (pruning, self._selector.epoch)
        for name, columns in self._selector.pruned_columns(pruning).items():
            layer = self._layers[name]
            layer.plan = self._layer_plan(layer, columns.tolist())
            self._lineage.record(name, layer.plan)
        self.pruned_share = self._share_of_plans()

    def clear(self) -> None:
        """No plan in any layer."""
        self.install(Pruning())

    @property
    def layer_shares(self) -> dict[str, float]:
        """Share of every layer's columns that is pruned."""
        return {name: layer.plan.pruned_share if layer.plan else 0.0 for name, layer in self._layers.items()}

    def _share_of_plans(self) -> float:
        work = sum(layer.weight.numel() for layer in self._layers.values())
        pruned = sum(layer.weight.numel() * layer.plan.pruned_share for layer in self._layers.values() if layer.plan)
        return pruned / work if work else 0.0

    def _layer_plan(self, layer: BalancedLinear, columns: list[int]) -> LayerPlan | None:
        if not columns:
            return None
        pruned = torch.tensor(columns, dtype=torch.int64, device="cpu")
        return LayerPlan.from_pruned(pruned, layer.num_columns, layer.weight.device, self._imputation)
