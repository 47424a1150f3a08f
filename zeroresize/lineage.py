"""The lineage table: which columns of which operand are pruned in the current step (paper, section III-A)."""

from __future__ import annotations

from torch import Tensor

from zeroresize.plan import LayerPlan

MATRICES = ("x", "w")


class LineageTable:
    """⟨layer_name, matrix_name⟩ → indices of the pruned columns.

    ``x`` and ``w`` of a layer are pruned alike (dual pruning), so both names lead to one index list, whose complement
    tells the layer's backward where its gradients belong.
    """

    def __init__(self, num_columns: dict[str, int]) -> None:
        self._num_columns = dict(num_columns)
        self._plans: dict[str, LayerPlan] = {}

    def record(self, layer_name: str, plan: LayerPlan | None) -> None:
        """Note ``plan`` as the layer's current one; None means nothing is pruned."""
        self._require_layer(layer_name)
        if plan is None:
            self._plans.pop(layer_name, None)
        else:
            self._plans[layer_name] = plan

    def pruned(self, layer_name: str, matrix_name: str) -> Tensor | None:
        """Sorted pruned column indices (int64) of ``matrix_name`` "x" or "w"; None where the layer has no plan.

        Raises:
            KeyError: for a layer that is not balanced.
            ValueError: for another matrix name.
        """
        self._require_layer(layer_name)
        if matrix_name not in MATRICES:
            raise ValueError(f"matrix_name={matrix_name!r} is not allowed: choose one of {list(MATRICES)}")
        plan = self._plans.get(layer_name)
        return None if plan is None else plan.pruned

    def _require_layer(self, layer_name: str) -> None:
        if layer_name not in self._num_columns:
            raise KeyError(f"no balanced layer is called {layer_name!r}: there are {sorted(self._num_columns)}")
