"""The optimizer's strategy of a model changes between two steps: weights move, and all that the optimizer keeps.

``P`` tensors, ``R`` ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank, message_device
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.switches.switch_plan import plan_weights
from zeroresize.resharding.movable_optimizer import require_movable_state, settings_of
from zeroresize.resharding.parameter_state import STATE, Description, ParameterState, agreed_descriptions, set_state
from zeroresize.resharding.transaction import Transaction
from zeroresize.resharding.transport import Transport
from zeroresize.strategy.placement.placement import Placement
from zeroresize.strategy.placement.whole_layers import WholeTensor
from zeroresize.strategy.switching.flows import Flow, FlowRounds, Relocation
from zeroresize.utils.hashing import fingerprint


class RankOptimizer:
    """Holds what a rank's optimizer keeps of the parameters of its strategy.

    Attributes:
        optimizer: None without one.
        settings: of its parameter groups, which must be alike on all ranks.

    Raises:
        ValueError: for a wrapper or ZeRO, one that steps other parameters than its strategy's, gradients that are still
            there, and state that is neither of the parameter's shape nor a single number or text.
    """

    def __init__(
        self, optimizer_placement: Placement, tensors: Sequence[WholeTensor], optimizer: object | None
    ) -> None:
        self._optimizer_placement, self._tensors = optimizer_placement, tensors
        named = {tensors[number].spec.name: one for number, one in optimizer_placement.masters.items()}
        self.optimizer = require_movable_state(optimizer, named)
        self._groups = [] if self.optimizer is None else self.optimizer.param_groups
        self.settings = settings_of(self.optimizer)
        known = {id(one): number for number, one in optimizer_placement.masters.items()}
        stepped = [(known.get(id(one)), index) for index, group in enumerate(self._groups) for one in group["params"]]
        others = sum(1 for number, _ in stepped if number is None)
        if others:
            raise ValueError(
                f"the optimizer steps {others} tensors that are no parameters of the model's optimizer strategy"
            )
        #: The parameter group of each tensor.
        self._group_of = {number: index for number, index in stepped if number is not None}
        for number, parameter in optimizer_placement.masters.items():
            if parameter.grad is not None:
                raise ValueError(f"{tensors[number].spec.name} has a gradient: call optimizer.zero_grad() before")
        self._states = {
            number: ParameterState(tensors[number].spec.name, master, master, self.optimizer)
            for number, master in optimizer_placement.masters.items()
        }

    def description(self) -> str:
        """Describe all that the other ranks must know."""
        described = [[number, asdict(state.description())] for number, state in self._states.items()]
        return json.dumps([self._group_of, described])

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the optimizer's tensors."""
        held = [value for state in self._states.values() for _, _, value in state.entries()]
        return sum(one.numel() * one.element_size() for one in held if isinstance(one, Tensor))

    def held(self, key: str) -> dict[int, Tensor]:
        """Return the optimizer's tensors of one kind, by the number of the tensor."""
        what = STATE + key
        return {number: state.tensors[what] for number, state in self._states.items() if what in state.tensors}

    def install(self, after: Placement, group_of: dict[int, int], state: dict[int, dict[str, Any]]) -> None:
        """Give the optimizer the parameters of another strategy in the same groups, and their state."""
        if self.optimizer is None:
            return
        for parameter in self._optimizer_placement.masters.values():
            set_state(self.optimizer, parameter, {})
        for index, group in enumerate(self._groups):
            numbers = [number for number in after.masters if group_of.get(number) == index]
            group["params"] = [after.masters[number] for number in numbers]
            if "param_names" in group:
                group["param_names"] = [self._tensors[number].spec.name for number in numbers]
        for number, values in state.items():
            if number in group_of:
                set_state(self.optimizer, after.masters[number], values)


class OptimizerMove(Transaction):
    """Moves the optimizer to another strategy, on this rank: weights, and all that it keeps.

    Args:
        strategy: that is wanted; ``after`` may have been made for another one that divides alike.
        nodes: [R], on which node each rank is.
        max_bytes: of messages that a rank sends and receives at once.

    Raises:
        ValueError: as :class:`RankOptimizer`.
    """

    plan_name = "the strategy, or the settings of the optimizer's parameter groups"

    def __init__(
        self,
        strategy: Strategy,
        before: Placement,
        after: Placement,
        optimizer: object | None,
        tensors: Sequence[WholeTensor],
        nodes: Sequence[int],
        process_group: ProcessGroup,
        device: torch.device,
        max_bytes: int,
    ) -> None:
        self._strategy, self._before, self._after, self._tensors = strategy, before, after, tensors
        self._nodes, self._group, self._device, self._max_bytes = nodes, process_group, device, max_bytes
        self._optimizer = RankOptimizer(before, tensors, optimizer)
        self.plan = fingerprint(json.dumps([strategy.as_dict(), self._optimizer.settings, list(nodes), max_bytes]))

    @property
    def title(self) -> str:
        return f"a move of the optimizer to {self._strategy}"

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the optimizer's tensors before the move."""
        return self._optimizer.held_bytes

    def needs_descriptions(self, states: Sequence[float]) -> bool:
        return True

    def describe(self) -> str:
        return self._optimizer.description()

    def agree(self, descriptions: Iterable[str] | None) -> None:
        """Take what all ranks hold, and lay out the rounds.

        Raises:
            RuntimeError: if ranks that hold parts of a tensor differ in its state, or in its parameter group.
        """
        before, after, tensors, rank = self._before, self._after, self._tensors, group_rank(self._group)
        self._agreed, self._group_of = _agreed(descriptions or (), tensors)
        plan = plan_weights(before.layout, after.layout, [tensor.spec for tensor in tensors], self._nodes)
        flows = [Flow(plan.transfers, {number: one.dtype for number, one in enumerate(tensors)})]
        masters = {number: one.data for number, one in before.masters.items()}
        dtypes = {number: one.dtype for number, one in after.masters.items()}
        self._weights = Relocation(before, after, tensors, rank, masters, dtypes)
        self._state: dict[str, Relocation] = {}
        for what in sorted({what for one in self._agreed for what in one.dtypes if what.startswith(STATE)}):
            key = what.removeprefix(STATE)
            dtypes = {number: one.dtype(what) for number, one in enumerate(self._agreed) if what in one.dtypes}
            flows.append(Flow(plan.transfers, dtypes))
            wanted = {number: dtype for number, dtype in dtypes.items() if number in after.masters}
            self._state[key] = Relocation(before, after, tensors, rank, self._optimizer.held(key), wanted)
        self._flows = FlowRounds.of(flows, tensors, rank, before.layout.replicas.tolist(), self._max_bytes)
        self.transport = Transport(self._flows.rounds, self._group)
        self.new_bytes = sum(relocation.new_bytes for relocation in self._moving)

    @property
    def _moving(self) -> list[Relocation]:
        return [self._weights, *self._state.values()]

    def allocate(self) -> None:
        self.transport.allocate(message_device(self._group, self._device))
        for relocation in self._moving:
            relocation.allocate(self._device)

    def send_and_receive(self) -> Exception | None:
        return self._flows.carry_out(self.transport, [relocation.ends() for relocation in self._moving])

    def commit(self) -> None:
        """Put weights and state in place, and let go of the old ones."""
        if self._after is not self._before:
            self._after.fill_masters(self._weights.tensors)
            self._before.let_go_of_masters()
        state: dict[int, dict[str, Any]] = {}
        for number, parameter in self._after.masters.items():
            state[number] = self._agreed[number].kept_values(parameter.device)
            for key, moved in self._state.items():
                if number in moved.tensors:
                    state[number][key] = moved.tensors[number]
        self._optimizer.install(self._after, self._group_of, state)


def _agreed(texts: Iterable[str], tensors: Sequence[WholeTensor]) -> tuple[list[Description], dict[int, int]]:
    by_rank: list[list[Description]] = []
    group_of: dict[int, tuple[int, int | None]] = {}
    for rank, text in enumerate(texts):
        groups, described = json.loads(text)
        descriptions = {number: Description(**one) for number, one in described}
        by_rank.append([descriptions.get(number, Description(one.spec.name, 0)) for number, one in enumerate(tensors)])
        for number in descriptions:
            group = groups.get(str(number))
            if group_of.setdefault(number, (rank, group))[1] != group:
                other, there = group_of[number]
                raise RuntimeError(
                    f"{tensors[number].spec.name} is in parameter group {there} of the optimizer on rank {other} of "
                    f"the group, and in {group} on rank {rank}: give it the same groups on all ranks"
                )
    agreed_groups = {number: group for number, (_, group) in group_of.items() if group is not None}
    return agreed_descriptions(by_rank), agreed_groups
