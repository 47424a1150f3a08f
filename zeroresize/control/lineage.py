"""The lineage table: which columns of which operand are pruned in the current step (paper, section III-A)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zeroresize.layers.balanced_linear import BalancedLinear

MATRICES = ("x", "w")


class LineageTable:
    """⟨layer_name, matrix_name⟩ → indices of the pruned columns.

    ``x`` and ``w`` of a layer are pruned alike (dual pruning), so both names lead to one index list, whose complement
    tells the layer's backward where its gradients belong.

    Args:
        layers: balanced layers by name, whose plans are looked up when asked.
    """

    def __init__(self, layers: Mapping[str, BalancedLinear]) -> None:
        self._layers = layers

    def pruned(self, layer_name: str, matrix_name: str) -> Tensor | None:
        """Sorted pruned column indices (int64) of ``matrix_name`` "x" or "w"; None where the layer has no plan.

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
