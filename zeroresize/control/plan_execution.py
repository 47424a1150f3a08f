"""A rank's plan in its layers: columns that each prunes and leaves to others, loans among the ranks, and pins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from zeroresize.comm.exchange import Exchange
from zeroresize.config import BalanceConfig
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segments import present_work_of_layers
from zeroresize.migration.lender import Lender
from zeroresize.plan.group import Relief, WorkloadPlan, Workshares
from zeroresize.plan.layer import LayerPlan
from zeroresize.policy.tensor.columns.selector import ColumnSelector
from zeroresize.resharding.units.owned_units import OwnedUnits

MATRICES = ("x", "w")


class PlanExecution:
    """Carries out one plan after another on this rank of the group.

    Attributes:
        pins: γ that is forced in place of the plan's, by rank; the same on every rank.
        planned: this rank's shares by what is decided, or by its pin, also while a calibration step is made; those of
            its own products are rounded to columns, layers weighted by the sizes of their matrices.
        ratio: γ of it, before it is rounded.
        layer_shares: share of every layer's columns that is pruned by it.
        shares_of_step: what this rank does in the iteration under way.
        shares_of_last_step: in the one before it; None before the first.
    """

    def __init__(
        self,
        config: BalanceConfig,
        rank: int,
        num_ranks: int,
        layers: Mapping[str, BalancedLinear],
        selector: ColumnSelector,
        lender: Lender | None = None,
        exchange: Exchange | None = None,
        units: OwnedUnits | None = None,
    ) -> None:
        self._config, self._rank, self._num_ranks, self._layers = config, rank, num_ranks, layers
        self._selector, self._lender, self._exchange, self._units = selector, lender, exchange, units
        #: The plan that is decided, the one that is carried out, and the edition of the columns; None for another one.
        self._in_force: tuple[WorkloadPlan, WorkloadPlan, int] | None = None
        self._written, self._written_shares = (Relief(), selector.edition), Workshares()
        self._pruned_shares: Mapping[str, float] = dict.fromkeys(layers, 0.0)
        self.pins: dict[int, float] = {}
        self.planned, self.ratio = Workshares(), 0.0
        self.layer_shares: Mapping[str, float] = self._pruned_shares
        self.lent_to: dict[int, float] = {}
        self._next_shares = self.shares_of_step = Workshares()
        self.shares_of_last_step: Workshares | None = None

    def install(self, decided: WorkloadPlan, calibration: WorkloadPlan | None = None) -> None:
        """Carry out ``decided``, or ``calibration`` if one comes before it, from the next iteration on.

        Collective over the group where loans are new.

        Raises:
            RuntimeError: if loans are new and not all ranks come.
        """
        plan, edition, in_force = calibration or decided, self._selector.edition, self._in_force
        if in_force is not None and in_force[0] is decided and in_force[1] is plan and in_force[2] == edition:
            return
        self._in_force = None
        self._write(self._relief(decided))
        self.planned, self.ratio = self._with_others(decided), self._written[0].spared
        self.layer_shares = self._pruned_shares
        self.lent_to = {
            receiver: self.planned.lent * part
            for loan in decided.loans
            if loan.owner == self._rank
            for receiver, part in zip(loan.receivers, loan.parts, strict=True)
        }
        if plan is not decided:
            self._write(self._relief(plan))
        self._next_shares = self._with_others(plan)
        if self._lender is not None:
            epoch = self._selector.state.epoch
            if self._exchange is not None and self._lender.would_be_new(plan.loans, epoch):
                self._exchange.meet()  # a rank that is a step ahead would send the others what they do not await
            self._lender.install(plan.loans, self._lent_columns() if plan.loans else {}, epoch=epoch)
        self._in_force = decided, plan, edition

    def take_back(self) -> None:
        """Let every layer compute all of its own columns, until the next :meth:`install`."""
        self.clear()
        if self._lender is not None:
            self._lender.take_back()

    def clear(self) -> None:
        """Take the plan out of every layer."""
        self._in_force = None
        self._write(Relief())

    def begin_step(self) -> None:
        """Begin an iteration under what is installed."""
        self.shares_of_step = self._next_shares

    def end_step(self) -> None:
        """End the iteration: count it for the selector."""
        self.shares_of_last_step = self.shares_of_step
        self._selector.count_step(self._written[0])

    def pin(self, rank: int, ratio: float) -> None:
        """Let ``rank`` prune ``ratio`` from the next :meth:`install` on, as :meth:`zeroresize.Balancer.pin`."""
        self._require_rank(rank)
        self.pins[rank] = self._config.pinned(ratio, rank).forced_ratio or 0.0
        self._in_force = None

    def release(self, rank: int | None) -> None:
        """Take back the pin of ``rank``, or of all ranks, from the next :meth:`install` on."""
        if rank is None:
            self.pins.clear()
        else:
            self._require_rank(rank)
            self.pins.pop(rank, None)
        self._in_force = None

    @property
    def is_forced(self) -> bool:
        """Whether someone forced just the ratio of the next step."""
        return self._written[0].is_forced

    @property
    def agreed(self) -> tuple[object, ...]:
        """What every rank of the group must have alike, besides what is decided."""
        return self._selector.state.epoch, sorted(self.pins.items())

    def _with_others(self, plan: WorkloadPlan) -> Workshares:
        """What is written, with what this rank computes for others by ``plan``, and the units it owns."""
        borrowed, owned = plan.ranks[self._rank].borrowed, 1.0 if self._units is None else self._units.owned
        return replace(self._written_shares, borrowed=borrowed, owned=owned)

    def _relief(self, plan: WorkloadPlan) -> Relief:
        """What this rank is relieved of under ``plan``, or by its pin."""
        if self._rank in self.pins:
            return Relief(self.pins[self._rank], is_forced=True)
        planned = plan.ranks[self._rank]
        return Relief(planned.pruned, planned.lent, is_forced=self._config.forced_ratio is not None)

    def _require_rank(self, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self._num_ranks:
            raise ValueError(f"rank={rank!r} is outside the process group: allowed are 0 to {self._num_ranks - 1}")

    def _write(self, relief: Relief) -> None:
        """Prune, and leave to others, the columns that the selector names, from the next forward on."""
        if self._written == (relief, self._selector.edition):
            return
        self._written = relief, self._selector.edition
        pruned, lent = self._selector.pruned_columns(relief), self._selector.lent_columns(relief)
        for name, layer in self._layers.items():
            layer.plan = None
            if len(pruned[name]) or len(lent[name]):
                layer.plan = LayerPlan.from_pruned(
                    torch.tensor(pruned[name].tolist(), dtype=torch.int64, device="cpu"),
                    layer.num_columns,
                    layer.local_weight.device,
                    self._config.paper.imputation,
                    torch.tensor(lent[name].tolist(), dtype=torch.int64, device="cpu"),
                )
        plans = {name: layer.plan for name, layer in self._layers.items()}
        self._pruned_shares = {name: plan.pruned_share if plan else 0.0 for name, plan in plans.items()}
        lent_shares = {name: plan.lent_share if plan else 0.0 for name, plan in plans.items()}
        self._written_shares = Workshares(self._share_of_work(self._pruned_shares), self._share_of_work(lent_shares))

    def _share_of_work(self, shares: Mapping[str, float]) -> float:
        work = present_work_of_layers(self._layers)
        return sum(work[name] * share for name, share in shares.items()) / max(sum(work.values()), 1)

    def _lent_columns(self) -> dict[str, Tensor]:
        """What is lent of every layer, in the order in which it is divided; on the layers' devices."""
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return {name: layer.plan.lent if layer.plan is not None else none for name, layer in self._layers.items()}


class LineageTable:
    """Tells which columns of which operand are pruned in the current step (paper, section III-A).

    ``x`` and ``w`` of a layer are pruned alike (dual pruning), so both names lead to one index list, whose complement
    tells the layer's backward where its gradients belong.
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
