"""A rank's part of a switch from one strategy to another: new weights beside the old ones until all ranks have theirs.

``P`` tensors, ``R`` ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import message_device
from zeroresize.resharding.agreement import fingerprint
from zeroresize.resharding.layout import Indices, Layout
from zeroresize.strategy.carrying import Carrier, Ends
from zeroresize.strategy.placement import Placement
from zeroresize.strategy.sharding import WholeTensor
from zeroresize.strategy.switch_messages import Flow, Round, fingerprint_of, rounds_of
from zeroresize.strategy.switch_plan import Transfers, plan_gradients, plan_weights


@dataclass(frozen=True)
class SwitchReport:
    """What a switch was on this rank.

    Attributes:
        seconds: wall time.
        sent_bytes, received_bytes: by this rank.
        num_rounds: in which messages were sent.
        new_bytes: of tensors that were made, beside those that were there.
        buffer_bytes: memory of messages.
        peak_bytes: of parameters, gradients and messages together, at most, while it went on.
    """

    seconds: float
    sent_bytes: int = 0
    received_bytes: int = 0
    num_rounds: int = 0
    new_bytes: int = 0
    buffer_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Route:
    """All that a switch between two strategies is, computed once.

    Attributes:
        rounds: of this rank.
        has_gradients: whether gradients travel, too.
        fingerprint: the same on ranks with the same plan.
    """

    rounds: Sequence[Round]
    has_gradients: bool
    fingerprint: float

    @classmethod
    def of(
        cls,
        before: Placement,
        after: Placement,
        home: Placement | None,
        tensors: Sequence[WholeTensor],
        nodes: Sequence[int],
        rank: int,
        max_bytes: int,
    ) -> Route:
        """From one strategy to another.

        Args:
            home: where the gradients go; None where they stay.
            nodes: [R], on which node each rank is.
            max_bytes: of messages that a rank sends and receives at once.
        """
        specs = [one.spec for one in tensors]
        flows = [Flow(plan_weights(before.layout, after.layout, specs, nodes).transfers)]
        if home is not None:
            plan = plan_gradients(before.layout, home.layout, specs, nodes)
            learns = np.array([one.requires_grad for one in tensors])
            flows.append(Flow(_of(plan.transfers, learns), _of(plan.kept, learns)))
        # Partial gradients are added in the order of the replicas that they come from: on ranks that hold the same
        # the sums are the same to the last bit.
        rounds = rounds_of(flows, tensors, rank, before.layout.replicas.tolist(), max(max_bytes // 2, 1))
        told = [None if one is None else one.strategy.as_dict() for one in (before, after, home)]
        return cls(rounds, home is not None, fingerprint(json.dumps([told, max_bytes, fingerprint_of(flows)])))


class Switch:
    """A switch on this rank, from the route to the installed weights.

    Attributes:
        new_bytes: of tensors that :meth:`allocate` makes.
        carrier: of the messages.
    """

    def __init__(
        self,
        route: Route,
        before: Placement,
        after: Placement,
        home: Placement,
        tensors: Sequence[WholeTensor],
        process_group: ProcessGroup,
    ) -> None:
        self._route, self._before, self._after, self._home = route, before, after, home
        self._tensors, self._rank = tensors, process_group.rank()
        self._where = lambda device: message_device(process_group, device)
        self.carrier = Carrier(route.rounds, process_group)
        held, wanted = (_own_range(one.layout, self._rank) for one in (before, after))
        #: Weights that stay where they are: the same units before and after.
        self._same = [
            one for one in after.parameters if one in before.parameters and held[one].tolist() == wanted[one].tolist()
        ]
        self._made = [one for one in after.parameters if one not in set(self._same)]
        self._made_gradients = [
            number
            for number, one in home.parameters.items()
            if route.has_gradients and tensors[number].requires_grad and one.grad is None
        ]
        self.new_bytes = sum(_num_bytes(after.parameters[one]) for one in self._made)
        self.new_bytes += sum(_num_bytes(home.parameters[one]) for one in self._made_gradients)

    def allocate(self, device: torch.device) -> None:
        """Make the new tensors and the memory of messages."""
        self.carrier.allocate(self._where(device))
        self._new = {one: _empty_like(self._after.parameters[one]) for one in self._made}
        self._gradients = {one: _empty_like(self._home.parameters[one]).zero_() for one in self._made_gradients}

    def carry_out(self) -> Exception | None:
        """Send and receive everything; returns the first failure."""
        try:
            self._copy_own()
            ends = [self._weights()]
            if self._route.has_gradients:
                ends.append(self._partial_gradients())
        except Exception as error:  # the others wait for messages all the same
            return error
        failure = self.carrier.carry_out(ends)
        if any(one.is_cuda for one in self._new.values()):  # a wait only orders streams
            torch.cuda.synchronize()
        return failure

    def install(self) -> None:
        """Put the new weights in place, and let go of the old ones and of gradients that have been sent."""
        for number in self._same:
            self._after.parameters[number].data = self._before.parameters[number].data
        for number, new in self._new.items():
            self._after.parameters[number].data = new
        if self._after is not self._before:
            self._before.let_go()
        for number, gradient in self._gradients.items():
            self._home.parameters[number].grad = gradient
        if self._route.has_gradients:
            for one in self._before.parameters.values():
                one.grad = None

    def _copy_own(self) -> None:
        """What this rank has of its new weights already."""
        held, wanted = (_own_range(one.layout, self._rank) for one in (self._before, self._after))
        for number, new in self._new.items():
            begin, end = max(held[number][0], wanted[number][0]), min(held[number][1], wanted[number][1])
            if number in self._before.parameters and begin < end:
                tensor, old = self._tensors[number], self._before.parameters[number].data
                source = self._before.stack(number, tensor, old, self._rank)
                target = self._after.stack(number, tensor, new, self._rank)
                num_units = int(end - begin)
                target.narrow(2, int(begin - wanted[number][0]), num_units).copy_(
                    source.narrow(2, int(begin - held[number][0]), num_units)
                )

    def _weights(self) -> Ends:
        return Ends(
            {
                number: self._before.stack(number, self._tensors[number], one.data, self._rank)
                for number, one in self._before.parameters.items()
            },
            {
                number: self._after.stack(number, self._tensors[number], new, self._rank)
                for number, new in self._new.items()
            },
            _own_range(self._before.layout, self._rank)[:, 0],
            _own_range(self._after.layout, self._rank)[:, 0],
        )

    def _partial_gradients(self) -> Ends:
        sources: dict[int, Tensor | None] = {
            number: None
            if one.grad is None
            else self._before.stack(number, self._tensors[number], one.grad, self._rank)
            for number, one in self._before.parameters.items()
        }
        targets = {}
        for number, one in self._home.parameters.items():
            if self._tensors[number].requires_grad:
                known = self._gradients.get(number, one.grad)
                assert known is not None
                targets[number] = self._home.stack(number, self._tensors[number], known, self._rank)
        return Ends(
            sources,
            targets,
            _own_range(self._before.layout, self._rank)[:, 0],
            _own_range(self._home.layout, self._rank)[:, 0],
            adds=True,
        )


def _of(transfers: Transfers, is_wanted: np.ndarray) -> Transfers:
    return transfers.at(np.flatnonzero(is_wanted[transfers.tensors]))


def _own_range(layout: Layout, rank: int) -> Indices:
    """[P, 2]: where a rank's units of each tensor begin and end."""
    return np.stack([layout.begins[:, rank], layout.ends[:, rank]], axis=1)


def _num_bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _empty_like(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
