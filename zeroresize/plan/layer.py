"""What was decided for one layer: which columns are computed here.

``K`` input features of a layer on this rank, ``P`` of them kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zeroresize.plan.columns import Columns


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """Describe which columns of one layer are computed, where, and what becomes of the gradients of the others.

    Attributes:
        kept: the P columns computed here, sorted, on the layer's device. P ≥ 1 unless all are lent.
        pruned: columns that nobody computes, sorted, int64, on the layer's device.
        lent: columns that other ranks compute, in the order in which they are divided among them, int64, on the layer's
            device; their gradients are zero here until those ranks' results arrive.
        imputation: ``"zero"``, ``"average"`` or ``"same"``, see :class:`~zeroresize.BalanceConfig`.
    """

    kept: Columns
    pruned: Tensor
    lent: Tensor
    imputation: str = "zero"

    @classmethod
    def from_pruned(
        cls,
        pruned: Tensor,
        num_columns: int,
        device: torch.device | str = "cpu",
        imputation: str = "zero",
        lent: Tensor | None = None,
    ) -> LayerPlan:
        """Return a plan that drops the columns ``pruned`` and lends ``lent`` (int64, on the CPU) of ``num_columns``.

        Its index lists are put on ``device``, so that no product ever waits for one.

        Raises:
            ValueError: if an index is out of range or repeated, or no column would be kept and not all are lent.
        """
        lent = torch.empty(0, dtype=torch.int64, device="cpu") if lent is None else lent
        elsewhere = torch.cat([pruned, lent])
        if elsewhere.numel() and (int(elsewhere.min()) < 0 or int(elsewhere.max()) >= num_columns):
            raise ValueError(f"pruned and lent columns must lie in 0 to {num_columns - 1}, found {elsewhere.tolist()}")
        is_kept = torch.ones(num_columns, dtype=torch.bool, device="cpu")
        is_kept[elsewhere] = False
        keep_P = is_kept.nonzero().squeeze(1)
        if keep_P.numel() + elsewhere.numel() != num_columns:
            raise ValueError("pruned and lent columns must be different from each other")
        if keep_P.numel() == 0 and lent.numel() < num_columns:
            raise ValueError(f"a plan must keep at least one of {num_columns} columns, or lend all")
        pruned, lent = (indices.to(device, non_blocking=True) for indices in (pruned.sort().values, lent))
        return cls(Columns.at(keep_P, device), pruned, lent, imputation)

    @property
    def keep_P(self) -> Tensor:
        """Return the indices of the kept columns, int64."""
        return self.kept.indices

    @property
    def num_columns(self) -> int:
        """Return K, the layer's input features on this rank."""
        return self.kept.indices.numel() + self.pruned.numel() + self.lent.numel()

    @cached_property
    def places(self) -> tuple[int, Tensor]:
        """Return a length of blocks, and of each block of the layer's columns its place in ``kept``, int64.

        Blocks of which no column is kept have the number of kept blocks for a place.
        """
        block = self.kept.block if self.num_columns % self.kept.block == 0 else 1
        kept = self.keep_P[::block] // block
        places = kept.new_full((self.num_columns // block,), len(kept))
        places[kept] = torch.arange(len(kept), device=kept.device)
        return block, places

    @property
    def pruned_share(self) -> float:
        """Share of the layer's product FLOPs that nobody computes, 0 to 1."""
        return self.pruned.numel() / self.num_columns

    @property
    def lent_share(self) -> float:
        """Share of the layer's product FLOPs that other ranks compute, 0 to 1."""
        return self.lent.numel() / self.num_columns
