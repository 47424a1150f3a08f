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

from zeroresize.comm.collectives import group_rank, message_device
from zeroresize.policy.strategy.switches.switch_plan import plan_gradients, plan_weights
from zeroresize.resharding.agreement import bytes_up_to_peak
from zeroresize.resharding.transaction import MoveReport, Transaction
from zeroresize.resharding.transport import Transport
from zeroresize.strategy.placement.placement import Placement
from zeroresize.strategy.placement.whole_layers import WholeTensor
from zeroresize.strategy.switching.flows import Flow, FlowEnds, FlowRounds, Relocation, stack_of
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
        figures = [one.figures(begin) for one in switches]
        sums = {key: sum(one[key] for one in figures) for key in figures[0] if key != "seconds"}
        needed = sum(one["new_bytes"] + one["buffer_bytes"] for one in figures)
        return cls(seconds=time.perf_counter() - begin, peak_bytes=held + needed, **sums)


@dataclass(frozen=True)
class TravelTypes:
    """Names the types of weights and of gradients while they travel; None for those in which they are held."""

    weights: torch.dtype | None = None
    gradients: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class SwitchRoute:
    """Holds all that a switch between two strategies is, computed once.

    Attributes:
        rounds: of this rank.
        has_weights, has_gradients: what travels.
        has_sums: whether nodes sum gradients before they leave them.
        types: in which it travels.
        fingerprint: the same on ranks with the same plan.
    """

    rounds: FlowRounds
    has_weights: bool
    has_gradients: bool
    has_sums: bool
    types: TravelTypes
    fingerprint: float

    @classmethod
    def of(
        cls,
        before: Placement,
        after: Placement | None,
        optimizer_placement: Placement | None,
        tensors: Sequence[WholeTensor],
        nodes: Sequence[int],
        rank: int,
        max_bytes: int,
        types: TravelTypes,
    ) -> SwitchRoute:
        """Plan the way from one strategy to another (HotSPa, Algorithm 1).

        Args:
            after: where the weights go; None where they do not travel.
            optimizer_placement: where the gradients go; None where they stay.
            nodes: [R], on which node each rank is.
            max_bytes: of messages that a rank sends and receives at once.
        """
        specs = [one.spec for one in tensors]
        flows: list[Flow] = []
        has_sums = False
        if after is not None:
            transfers = plan_weights(before.layout, after.layout, specs, nodes).transfers
            flows.append(Flow(transfers, {number: types.weights or one.dtype for number, one in enumerate(tensors)}))
        if optimizer_placement is not None:
            plan = plan_gradients(before.layout, optimizer_placement.layout, specs, nodes)
            learning = {number: one.dtype for number, one in enumerate(tensors) if one.requires_grad}
            dtypes = {number: types.gradients or dtype for number, dtype in learning.items()}
            flows.append(Flow(plan.transfers, dtypes, plan.kept))
            # In the type in which gradients are held: so what then leaves the node is rounded once.
            flows.append(Flow(plan.summed, learning, turn=-1))
            has_sums = len(plan.summed) > 0
        # Partial gradients are added in the order of the replicas that they come from: on ranks that hold the same
        # the sums are the same to the last bit.
        rounds = FlowRounds.of(flows, tensors, rank, before.layout.replicas.tolist(), max_bytes)
        way = [None if one is None else one.strategy.as_dict() for one in (before, after, optimizer_placement)]
        return cls(
            rounds,
            after is not None,
            optimizer_placement is not None,
            has_sums,
            types,
            fingerprint(json.dumps([way, max_bytes, str(types), rounds.fingerprint])),
        )


class Switch(Transaction):
    """Switches this rank from one strategy to another, or carries out what of that the route has.

    Args:
        after: the strategy that is in force then; None where only gradients travel.
        process_group: over which messages travel.
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
        tensors: Sequence[WholeTensor],
        process_group: ProcessGroup,
        device: torch.device,
        *,
        is_beside: bool = False,
    ) -> None:
        self._route, self._device, self._is_beside = route, device, is_beside
        self._has_gradients, self.plan = route.has_gradients, route.fingerprint
        self._before, self._after, self._optimizer_placement = before, after, optimizer_placement
        self._tensors, self._rank = tensors, group_rank(process_group)
        self._group = process_group
        self._weights: Relocation | None = None
        if route.has_weights:
            assert after is not None
            self._weights = Relocation(before, after, tensors, self._rank, before.weights, after.dtypes)
        for number, parameter in before.masters.items() if self._has_gradients else ():
            gradient = parameter.grad
            if gradient is not None and (gradient.layout is not torch.strided or gradient.dtype != parameter.dtype):
                raise ValueError(
                    f"{tensors[number].spec.name}: a gradient of {gradient.dtype} and {gradient.layout} cannot travel; "
                    f"allowed are those of {parameter.dtype} and {torch.strided}"
                )
        #: Of the optimizer's strategy, where it has none yet.
        self._gradients: dict[int, Tensor] = {}
        learning = optimizer_placement.masters.items() if self._has_gradients else ()
        self._without = [number for number, one in learning if one.requires_grad and one.grad is None]
        of_gradients = (optimizer_placement.masters[number] for number in self._without)
        #: Of the strategy that is left, where there are none and those of others on the node are to be added.
        self._zeros: dict[int, Tensor] = {}
        self._without_before = [
            number
            for number, master in (before.masters.items() if route.has_sums else ())
            if master.requires_grad and master.grad is None
        ]
        of_before = (before.masters[number] for number in self._without_before)
        self.new_bytes = sum(one.numel() * one.element_size() for one in (*of_gradients, *of_before))
        self.new_bytes += 0 if self._weights is None else self._weights.new_bytes

    @property
    def title(self) -> str:
        if self._after is None:
            return f"the gradients of {self._before.strategy}"
        return f"a switch to {self._after.strategy}"

    @property
    def needed_bytes(self) -> int:
        return super().needed_bytes + (bytes_up_to_peak(self._device) if self._is_beside else 0)

    def agree(self, descriptions: Iterable[str] | None) -> None:
        """Lay out the rounds of the route, which is planned by what all ranks know."""
        self.transport = Transport(self._route.rounds.rounds, self._group)

    def allocate(self) -> None:
        self.transport.allocate(message_device(self._group, self._device))
        if self._weights is not None:
            self._weights.allocate(self._device)
        for number in self._without:
            parameter = self._optimizer_placement.masters[number]
            self._gradients[number] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self._device)
        for number in self._without_before:
            self._zeros[number] = torch.zeros_like(self._before.masters[number], device=self._device)

    def commit(self) -> None:
        """Put the new weights in place, and let go of the old ones and of gradients that have been sent."""
        before, after = self._before, self._after
        if after is not None and after is not before:
            if self._weights is not None:
                after.fill(self._weights.tensors)
            before.let_go()
        for number, gradient in self._gradients.items():
            self._optimizer_placement.masters[number].grad = gradient
        if self._has_gradients:
            before.drop_gradients()

    def send_and_receive(self) -> Exception | None:
        ends = [] if self._weights is None else [self._weights.ends()]
        if self._has_gradients:
            ends += self._partial_gradients()
        return self._route.rounds.carry_out(self.transport, ends)

    def _gradient_stacks(self) -> dict[int, Tensor | None]:
        """Of the strategy that is left, by the number of the tensor."""
        stacks: dict[int, Tensor | None] = {}
        for number, parameter in self._before.masters.items():
            gradient = self._zeros.get(number, parameter.grad)
            if gradient is not None and self._route.has_sums and not gradient.is_contiguous():
                gradient = parameter.grad = gradient.contiguous()  # of which a stack is a view
            stacks[number] = (
                None if gradient is None else stack_of(self._before, number, self._tensors, gradient, self._rank)
            )
        return stacks

    def _partial_gradients(self) -> list[FlowEnds]:
        """Where they leave and arrive, and where those of a node are summed before."""
        before, optimizer_placement, rank = self._before, self._optimizer_placement, self._rank
        sources, targets = self._gradient_stacks(), {}
        for number, parameter in optimizer_placement.masters.items():
            gradient = self._gradients.get(number, parameter.grad)
            if gradient is not None and not gradient.is_contiguous():
                gradient = parameter.grad = gradient.contiguous()  # of which a stack is a view
            if gradient is not None:
                targets[number] = stack_of(optimizer_placement, number, self._tensors, gradient, rank)
        begins = before.layout.begins[:, rank], optimizer_placement.layout.begins[:, rank]
        sums = {number: stack for number, stack in sources.items() if stack is not None}
        return [
            FlowEnds(sources, targets, *begins, adds=True),
            FlowEnds(sums, sums, begins[0], begins[0], adds=True),
        ]
