"""A rank's part of a switch from one strategy to another: new weights beside the old ones until all ranks have theirs.

``P`` tensors, ``R`` ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank, message_device
from zeroresize.policy.strategy.switches.switch_plan import plan_gradients, plan_weights
from zeroresize.resharding.transaction import MoveReport, Transaction
from zeroresize.strategy.placement.placement import Placement
from zeroresize.strategy.placement.whole_layers import WholeTensor
from zeroresize.strategy.switching.flow_transport import Ends, FlowTransport
from zeroresize.strategy.switching.relocation import Relocation
from zeroresize.strategy.switching.switch_rounds import Flow, SwitchRound, fingerprint_of, switch_rounds
from zeroresize.utils.fingerprint import fingerprint


@dataclass(frozen=True, kw_only=True)
class SwitchReport(MoveReport):
    """Tells what a switch, or a move of the optimizer, was on this rank.

    Attributes:
        peak_bytes: of parameters, gradients, optimizer state that moves, and messages together, at most.
    """

    peak_bytes: int


@dataclass(frozen=True, eq=False)
class SwitchRoute:
    """Holds all that a switch between two strategies is, computed once.

    Attributes:
        rounds: of this rank.
        has_gradients: whether gradients travel, too.
        fingerprint: the same on ranks with the same plan.
    """

    rounds: Sequence[SwitchRound]
    has_gradients: bool
    fingerprint: float

    @classmethod
    def of(
        cls,
        before: Placement,
        after: Placement,
        optimizer_placement: Placement | None,
        tensors: Sequence[WholeTensor],
        nodes: Sequence[int],
        rank: int,
        max_bytes: int,
    ) -> SwitchRoute:
        """Plan the way from one strategy to another (HotSPa, Algorithm 1).

        Args:
            optimizer_placement: where the gradients go; None where they stay.
            nodes: [R], on which node each rank is.
            max_bytes: of messages that a rank sends and receives at once.
        """
        specs = [one.spec for one in tensors]
        flows = [Flow(plan_weights(before.layout, after.layout, specs, nodes).transfers)]
        if optimizer_placement is not None:
            plan = plan_gradients(before.layout, optimizer_placement.layout, specs, nodes)
            learns = np.array([one.requires_grad for one in tensors])
            flows.append(Flow(plan.transfers, plan.kept).only(learns))
        # Partial gradients are added in the order of the replicas that they come from: on ranks that hold the same
        # the sums are the same to the last bit.
        rounds = switch_rounds(flows, tensors, rank, before.layout.replicas.tolist(), max(max_bytes // 2, 1))
        way = [None if one is None else one.strategy.as_dict() for one in (before, after, optimizer_placement)]
        return cls(
            rounds, optimizer_placement is not None, fingerprint(json.dumps([way, max_bytes, fingerprint_of(flows)]))
        )


class Switch(Transaction):
    """Switches this rank from one strategy to another.

    Raises:
        ValueError: for gradients that cannot travel.
    """

    plan_name = "where the switch leads, or how it was planned"
    transport: FlowTransport

    def __init__(
        self,
        route: SwitchRoute,
        before: Placement,
        after: Placement,
        optimizer_placement: Placement,
        tensors: Sequence[WholeTensor],
        process_group: ProcessGroup,
        device: torch.device,
    ) -> None:
        self._route, self._device = route, device
        self._has_gradients, self.plan = route.has_gradients, route.fingerprint
        self._before, self._after, self._optimizer_placement = before, after, optimizer_placement
        self._tensors, self._rank = tensors, group_rank(process_group)
        self._group = process_group
        self._weights = Relocation(before, after, tensors, self._rank, before.weights, after.dtypes)
        for number, parameter in before.parameters.items() if self._has_gradients else ():
            gradient = parameter.grad
            if gradient is not None and (gradient.layout is not torch.strided or gradient.dtype != parameter.dtype):
                raise ValueError(
                    f"{tensors[number].spec.name}: a gradient of {gradient.dtype} and {gradient.layout} cannot travel; "
                    f"allowed are those of {parameter.dtype} and {torch.strided}"
                )
        #: Of the optimizer's strategy, where it has none yet.
        self._gradients: dict[int, Tensor] = {}
        learning = optimizer_placement.parameters.items() if self._has_gradients else ()
        self._without = [number for number, one in learning if one.requires_grad and one.grad is None]
        of_gradients = (optimizer_placement.parameters[number] for number in self._without)
        self.new_bytes = self._weights.new_bytes + sum(one.numel() * one.element_size() for one in of_gradients)

    @property
    def title(self) -> str:
        return f"a switch to {self._after.strategy}"

    def agree(self, descriptions: Iterable[str] | None) -> None:
        """Lay out the rounds of the route, which is planned by what all ranks know."""
        self.transport = FlowTransport(self._route.rounds, self._group)

    def allocate(self) -> None:
        self.transport.allocate(message_device(self._group, self._device))
        self._weights.allocate(self._device)
        for number in self._without:
            parameter = self._optimizer_placement.parameters[number]
            self._gradients[number] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self._device)

    def carry_out(self) -> Exception | None:
        ends = [self._weights.ends()]
        if self._has_gradients:
            ends.append(self._partial_gradients())
        return self.transport.carry_out_flows(ends)

    def commit(self) -> None:
        """Put the new weights in place, and let go of the old ones and of gradients that have been sent."""
        put_in_place(self._weights, self._before, self._after)
        for number, gradient in self._gradients.items():
            self._optimizer_placement.parameters[number].grad = gradient
        if self._has_gradients:
            for parameter in self._before.parameters.values():
                parameter.grad = None

    def _partial_gradients(self) -> Ends:
        before, optimizer_placement, rank = self._before, self._optimizer_placement, self._rank
        sources, targets = {}, {}
        for number, parameter in before.parameters.items():
            gradient = parameter.grad
            sources[number] = None if gradient is None else before.stack(number, self._tensors[number], gradient, rank)
        for number, parameter in optimizer_placement.parameters.items():
            gradient = self._gradients.get(number, parameter.grad)
            if gradient is not None and not gradient.is_contiguous():
                gradient = parameter.grad = gradient.contiguous()  # of which a stack is a view
            if gradient is not None:
                targets[number] = optimizer_placement.stack(number, self._tensors[number], gradient, rank)
        return Ends(
            sources, targets, before.layout.begins[:, rank], optimizer_placement.layout.begins[:, rank], adds=True
        )


def put_in_place(weights: Relocation, before: Placement, after: Placement) -> None:
    """Give one strategy the weights, and leave the other one without."""
    if after is before:
        return
    for number, new in weights.tensors.items():
        after.parameters[number].data = new
    before.let_go()
