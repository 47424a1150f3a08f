"""Carrying out a rank's plan: which columns of which layer, written to the layers and to the lineage table."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeroresize.config import BalanceConfig
from zeroresize.lineage import LineageTable
from zeroresize.linear import BalancedLinear
from zeroresize.plan import LayerPlan
from zeroresize.policy.selection import num_pruned_columns, random_order


class PlanInstaller:
    """Turns this rank's pruning ratio into one ``LayerPlan`` a layer.

    Attributes:
        ratio: γ in force, as wanted.
        pruned_share: share of this rank's product FLOPs that the plan drops, after rounding to columns and blocks
            (layers weighted by their matrices' sizes).
    """

    def __init__(
        self, layers: Mapping[str, BalancedLinear], lineage: LineageTable, config: BalanceConfig, rank: int
    ) -> None:
        self._layers, self._lineage, self._config, self._rank = layers, lineage, config, rank
        self._installed: tuple[float, int] = (0.0, 0)
        self.ratio = 0.0

    def install(self, ratio: float, epoch: int) -> None:
        """Prune a share ``ratio`` of every layer's columns in the order of ``epoch``, from the next forward on."""
        self.ratio = ratio
        if (ratio, epoch) == self._installed:
            return
        self._installed = (ratio, epoch)
        for position, (name, layer) in enumerate(self._layers.items()):
            layer.plan = self._layer_plan(layer, position, ratio, epoch)
            self._lineage.record(name, layer.plan)

    def clear(self) -> None:
        """No plan in any layer."""
        self.install(0.0, 0)

    @property
    def pruned_share(self) -> float:
        work = sum(layer.weight.numel() for layer in self._layers.values())
        pruned = sum(layer.weight.numel() * layer.plan.pruned_share for layer in self._layers.values() if layer.plan)
        return pruned / work if work else 0.0

    def _layer_plan(self, layer: BalancedLinear, position: int, ratio: float, epoch: int) -> LayerPlan | None:
        num_pruned = num_pruned_columns(ratio, layer.num_columns, self._config.block)
        if num_pruned == 0:
            return None
        order = random_order(
            layer.num_columns,
            block=self._config.block,
            seed=self._config.seed,
            epoch=epoch,
            rank=self._rank,
            layer=position,
        )
        pruned = torch.tensor(order[:num_pruned].tolist(), dtype=torch.int64, device="cpu")
        return LayerPlan.from_pruned(pruned, layer.num_columns, layer.weight.device, self._config.imputation)
