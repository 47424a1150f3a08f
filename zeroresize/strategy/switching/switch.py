"""A rank's part of a switch from one strategy to another: new weights beside the old ones until all ranks have theirs.

``P`` tensors, ``R`` ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.policy.strategy.switches.switch_plan import plan_gradients, plan_weights
from zeroresize.resharding.agreement import bytes_up_to_peak
from zeroresize.resharding.transaction import MoveReport
from zeroresize.strategy.placement.placement import Placement
from zeroresize.strategy.switching.flows import Flow, FlowEnds, FlowMove, FlowRounds, Relocation
from zeroresize.utils.hashing import fingerprint


@dataclass(frozen=True, kw_only=True)
class SwitchReport(MoveReport):
    """Tells what a switch, or a move of the optimizer, was on this rank.

    Attributes:
        peak_bytes: of parameters, gradients, optimizer state that moves, and messages together, at most.
    """

    peak_bytes: int

    @classmethod
    def of(cls, switches: Sequence[Switch], begin: float, held: int) -> SwitchReport:
        """Sum up what has ended with a switch begun at ``begin`` (``time.perf_counter()``), beside ``held`` bytes."""
        figures = [switch.figures(begin) for switch in switches]
        sums = {key: sum(each[key] for each in figures) for key in figures[0] if key != "seconds"}
        peak = held + sums["new_bytes"] + sums["buffer_bytes"]
        return cls(seconds=time.perf_counter() - begin, peak_bytes=peak, **sums)


@dataclass(frozen=True)
class TravelTypes:
    """Names the types of weights and of gradients while they travel; None for those in which they are held."""

    weights: torch.dtype | None = None
    gradients: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class SwitchRoute:
    """Holds all that a switch between two strategies is, computed once.

    Attributes:
        has_weights, has_gradients: what travels.
        has_sums: whether nodes sum gradients before they leave them.
        fingerprint: the same on ranks with the same plan.
    """

    flows: FlowRounds
    has_weights: bool
    has_gradients: bool
    has_sums: bool
    fingerprint: float

    @classmethod
    def of(
        cls,
        before: Placement,
        after: Placement | None,
        optimizer_placement: Placement | None,
        nodes: Sequence[int],
        max_bytes: int,
        types: TravelTypes,
    ) -> SwitchRoute:
        """Plan the way from one strategy to another (HotSPa, Algorithm 1); as :meth:`Placements.route`."""
        tensors = before.tensors
        specs = [tensor.spec for tensor in tensors]
        flows: list[Flow] = []
        has_sums = False
        if after is not None:
            transfers = plan_weights(before.layout, after.layout, specs, nodes).transfers
            dtypes = {number: types.weights or tensor.dtype for number, tensor in enumerate(tensors)}
            flows.append(Flow(transfers, dtypes))
        if optimizer_placement is not None:
            plan = plan_gradients(before.layout, optimizer_placement.layout, specs, nodes)
            learning = {number: tensor.dtype for number, tensor in enumerate(tensors) if tensor.requires_grad}
            dtypes = {number: types.gradients or dtype for number, dtype in learning.items()}
            flows.append(Flow(plan.transfers, dtypes, plan.kept))
            # In the type in which gradients are held: so what then leaves the node is rounded once.
            flows.append(Flow(plan.summed, learning, turn=-1))
            has_sums = len(plan.summed) > 0
        rounds = FlowRounds.of(flows, before, max_bytes)
        ends = (before, after, optimizer_placement)
        way = [None if placement is None else placement.strategy.as_dict() for placement in ends]
        planned = fingerprint(json.dumps([way, max_bytes, str(types), rounds.fingerprint]))
        return cls(rounds, after is not None, optimizer_placement is not None, has_sums, planned)


class Switch(FlowMove):
    """Switches this rank from one strategy to another, or carries out what of that the route has.

    Args:
        after: the strategy that is in force then; None where only gradients travel.
        is_beside: whether training goes on meanwhile, so that what it takes must be free, too.

    Raises:
        ValueError: for gradients that cannot travel.
    """

    plan_name = "where the switch leads, or how it was planned"

    def __init__(
        self,
        route: SwitchRoute,
        before: Placement,
        after: Placement | None,
        optimizer_placement: Placement,
        process_group: ProcessGroup,
        device: torch.device,
        *,
        is_beside: bool = False,
    ) -> None:
        super().__init__(process_group, device)
        self._route, self._is_beside, self.plan = route, is_beside, route.fingerprint
        self._before, self._after, self._optimizer_placement = before, after, optimizer_placement
        self.title = f"the gradients of {before.strategy}" if after is None else f"a switch to {after.strategy}"
        if route.has_weights:
            assert after is not None
            self.relocations = [Relocation(before, after, before.weights, after.dtypes)]
        for number, parameter in before.masters.items() if route.has_gradients else ():
            gradient = parameter.grad
            if gradient is not None and (gradient.layout is not torch.strided or gradient.dtype != parameter.dtype):
                raise ValueError(
                    f"{before.tensors[number].spec.name}: a gradient of {gradient.dtype} and {gradient.layout} cannot "
                    f"travel; allowed are those of {parameter.dtype} and {torch.strided}"
                )
        #: Zeros for parameters without gradients: of the optimizer's strategy, to which others are added; and of the
        #: strategy that is left, where those of others on the node are.
        self._gradients, self._sums = (
            {
                number: torch.empty(0)
                for number, master in (placement.masters.items() if is_needed else ())
                if master.requires_grad and master.grad is None
            }
            for placement, is_needed in ((optimizer_placement, route.has_gradients), (before, route.has_sums))
        )
        without = [optimizer_placement.masters[number] for number in self._gradients]
        without += [before.masters[number] for number in self._sums]
        self.new_bytes = sum(master.numel() * master.element_size() for master in without)
        self.new_bytes += sum(relocation.new_bytes for relocation in self.relocations)

    @property
    def needed_bytes(self) -> int:
        return super().needed_bytes + (bytes_up_to_peak(self._device) if self._is_beside else 0)

    def agree(self, descriptions: Iterable[str]) -> None:
        """Take the rounds of the route, which is planned by what all ranks know."""
        self.flows = self._route.flows
        self.lay_out(self.flows.rounds)

    def make_tensors(self) -> None:
        super().make_tensors()
        for zeros, placement in ((self._gradients, self._optimizer_placement), (self._sums, self._before)):
            for number in zeros:
                master = placement.masters[number]
                zeros[number] = torch.zeros(master.shape, dtype=master.dtype, device=self._device)

    def commit(self) -> None:
        """Put the new weights in place, and let go of the old ones and of gradients that have been sent."""
        before, after = self._before, self._after
        if after is not None and after is not before:
            for relocation in self.relocations:
                after.fill(relocation.tensors)
            before.let_go()
        for number, gradient in self._gradients.items():
            self._optimizer_placement.masters[number].grad = gradient
        if self._route.has_gradients:
            before.drop_gradients()

    def ends(self) -> list[FlowEnds]:
        ends = super().ends()
        if not self._route.has_gradients:
            return ends
        before, after = self._before, self._optimizer_placement
        sums = self._stacks(before, self._sums, in_place=self._route.has_sums)
        sources: dict[int, Tensor | None] = {number: sums.get(number) for number in before.masters}
        targets = self._stacks(after, self._gradients, in_place=True)
        return [
            *ends,
            FlowEnds(sources, targets, before, after, adds=True),
            FlowEnds(sums, sums, before, before, adds=True),
        ]

    def _stacks(self, placement: Placement, zeros: dict[int, Tensor], *, in_place: bool) -> dict[int, Tensor]:
        """The gradients under a strategy, as views of them where they are added to."""
        stacks: dict[int, Tensor] = {}
        for number, master in placement.masters.items():
            gradient = zeros.get(number, master.grad)
            if gradient is None:
                continue
            if in_place and not gradient.is_contiguous():
                gradient = master.grad = gradient.contiguous()
            stacks[number] = placement.stack(number, gradient)
        return stacks
