"""A rank's plan in its layers: which columns of which layer it prunes, written there and looked up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segments import present_work_of_layers
from zeroresize.plan.group import Relief, Shares
from zeroresize.plan.layer import LayerPlan
from zeroresize.policy.tensor.columns.selector import ColumnSelector

MATRICES = ("x", "w")


class PlanInstaller:
    """Turns what this rank is relieved of into one ``LayerPlan`` a layer.

    Attributes:
        relief: what is in force.
        shares: of this rank's product FLOPs, what it drops and leaves to others, after rounding to columns and blocks
            (layers weighted by the sizes of their matrices, as this rank owns them).
        layer_shares: share of every layer's columns that is pruned.
    """

    def __init__(self, layers: Mapping[str, BalancedLinear], selector: ColumnSelector, imputation: str) -> None:
        self._layers, self._selector, self._imputation = layers, selector, imputation
        self.relief = Relief()
        self.shares = Shares()
        self.layer_shares = dict.fromkeys(layers, 0.0)
        self._edition_in_force = selector.edition

    def install(self, relief: Relief) -> None:
        """Prune, and leave to others, the columns that the selector names, from the next forward on."""
        if (relief, self._selector.edition) == (self.relief, self._edition_in_force):
            return
        self.relief, self._edition_in_force = relief, self._selector.edition
        pruned_columns, lent_columns = self._selector.pruned_columns(relief), self._selector.lent_columns(relief)
        for name, layer in self._layers.items():
            layer.plan = self._layer_plan(layer, pruned_columns[name].tolist(), lent_columns[name].tolist())
        plans = {name: layer.plan for name, layer in self._layers.items()}
        self.layer_shares = {name: plan.pruned_share if plan else 0.0 for name, plan in plans.items()}
        lent_shares = {name: plan.lent_share if plan else 0.0 for name, plan in plans.items()}
        self.shares = Shares(self._share_of_work(self.layer_shares), self._share_of_work(lent_shares))

    def clear(self) -> None:
        """Take the plan out of every layer."""
        self.install(Relief())

    def lent_columns(self) -> dict[str, Tensor]:
        """Return what is lent of every layer, in the order in which it is divided; on the layers' devices."""
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return {name: layer.plan.lent if layer.plan is not None else none for name, layer in self._layers.items()}

    def _share_of_work(self, shares: Mapping[str, float]) -> float:
        work = present_work_of_layers(self._layers)
        return sum(work[name] * share for name, share in shares.items()) / max(sum(work.values()), 1)

    def _layer_plan(self, layer: BalancedLinear, pruned: list[int], lent: list[int]) -> LayerPlan | None:
        if not pruned and not lent:
            return None
        return LayerPlan.from_pruned(
            torch.tensor(pruned, dtype=torch.int64, device="cpu"),
            layer.num_columns,
            layer.local_weight.device,
            self._imputation,
            torch.tensor(lent, dtype=torch.int64, device="cpu"),
        )


class LineageTable:
    """Tells which columns of which operand are pruned in the current step (paper, section III-A).

    ``x`` and ``w`` of a layer are pruned alike (dual pruning), so both names lead to one index list, whose complement
    tells the layer's backward where its gradients belong.

    Args:
        layers: balanced layers by name, whose plans are looked up when asked.
    """

    def __init__(self, layers: Mapping[str, BalancedLinear]) -> None:
        self._layers = layers

    def pruned(self, layer_name: str, matrix_name: str) -> Tensor | None:
        """Return sorted pruned column indices (int64) of ``matrix_name`` "x" or "w"; None where the layer has no plan.

        Raises:
            KeyError: for a layer that is not balanced.
            ValueError: for another matrix name.
        """
        if layer_name not in self._layers:
            raise KeyError(f"no balanced layer is called {layer_name!r}: there are {sorted(self._layers)}")
        if matrix_name not in MATRICES:
            raise ValueError(f"matrix_name={matrix_name!r} is not allowed: choose one of {list(MATRICES)}")
        plan = self._layers[layer_name].plan
        return None if plan is None else plan.pruned
