"""What was decided, as data: for the group, for a rank, for a layer.

``K`` input features of a layer on this rank, ``P`` of them kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RankPlan:
    """One rank's share of a plan.

    Attributes:
        ratio: pruning ratio γ, the share of every layer's columns that the rank does not compute.
        is_straggler: whether the rank was found to be one.
    """

    ratio: float = 0.0
    is_straggler: bool = False


@dataclass(frozen=True)
class WorkloadPlan:
    """The group's plan: the same on every rank, since all compute it from the same exchanged numbers.

    Attributes:
        update: number of the update that decided it; 0 is the plan in force from the first iteration.
        ranks: one ``RankPlan`` a rank, in the order of the group.
        predicted_step_s: busy time in seconds of the slowest rank under this plan; NaN before anything was measured.
        begins_at_full_work: whether the first iteration under this plan computes everything, to be measured.
    """

    update: int
    ranks: tuple[RankPlan, ...]
    predicted_step_s: float = float("nan")
    begins_at_full_work: bool = False


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """Which columns of one layer are computed, and what becomes of the gradients of the others.

    Attributes:
        keep_P: kept columns, sorted, int64, on the layer's device. P ≥ 1.
        pruned: the other columns, sorted, int64, on the layer's device.
        imputation: ``"zero"``, ``"average"`` or ``"same"``, see :class:`~zeroresize.BalanceConfig`.
    """

    keep_P: Tensor
    pruned: Tensor
    imputation: str = "zero"

    @classmethod
    def from_pruned(
        cls,
        pruned: Tensor,
        num_columns: int,
        device: torch.device | str = "cpu",
        imputation: str = "zero",
    ) -> LayerPlan:
        """A plan that drops the columns ``pruned`` (any order, int64, on the CPU) of ``num_columns``.

        Its index lists are put on ``device``, so that no product ever waits for one.

        Raises:
            ValueError: if an index is out of range or repeated, or no column would be kept.
        """
        if pruned.numel() and (int(pruned.min()) < 0 or int(pruned.max()) >= num_columns):
            raise ValueError(f"pruned columns must lie in 0 to {num_columns - 1}, found {pruned.tolist()}")
        is_kept = torch.ones(num_columns, dtype=torch.bool, device="cpu")
        is_kept[pruned] = False
        keep_P = is_kept.nonzero().squeeze(1)
        if keep_P.numel() == 0:
            raise ValueError(f"a plan must keep at least one of {num_columns} columns")
        if keep_P.numel() + pruned.numel() != num_columns:
            raise ValueError("pruned columns must be different from each other")
        sorted_pruned = pruned.sort().values
        return cls(keep_P.to(device, non_blocking=True), sorted_pruned.to(device, non_blocking=True), imputation)

    @property
    def num_columns(self) -> int:
        """K, the layer's input features on this rank."""
        return self.keep_P.numel() + self.pruned.numel()

    @property
    def pruned_share(self) -> float:
        """Share of the layer's product FLOPs that is not computed, 0 to 1."""
        return self.pruned.numel() / self.num_columns
