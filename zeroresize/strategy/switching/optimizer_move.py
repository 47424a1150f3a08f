"""The optimizer's strategy of a model changes between two steps: weights move, and all that the optimizer keeps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.switches.switch_plan import plan_weights
from zeroresize.resharding.parameter_state import (
    PARAMETER,
    STATE,
    Description,
    ParameterState,
    agreed_descriptions,
    groups_of,
    require_movable_state,
    set_state,
    settings_of,
)
from zeroresize.strategy.placement.placement import Placement
from zeroresize.strategy.placement.whole_layers import WholeTensor
from zeroresize.strategy.switching.flows import Flow, FlowMove, FlowRounds, Relocation
from zeroresize.utils.hashing import fingerprint


class OptimizerMove(FlowMove):
    """Moves the optimizer to another strategy, on this rank: weights, and all that it keeps.

    Args:
        strategy: that is wanted; ``after`` may have been made for another one that divides alike.
        nodes: [R], on which node each rank is.

    Raises:
        ValueError: for a wrapper or ZeRO, one that steps other parameters than its strategy's, gradients that are still
            there, and state that is neither of the parameter's shape nor a single number or text.
    """

    plan_name = "the strategy, or the settings of the optimizer's parameter groups"

    def __init__(
        self,
        strategy: Strategy,
        before: Placement,
        after: Placement,
        optimizer: object | None,
        nodes: Sequence[int],
        process_group: ProcessGroup,
        device: torch.device,
        max_bytes: int,
    ) -> None:
        super().__init__(process_group, device)
        self._before, self._after, self._nodes = before, after, nodes
        self._max_bytes, self.title = max_bytes, f"a move of the optimizer to {strategy}"
        names = {number: before.tensors[number].spec.name for number in before.masters}
        self._optimizer = require_movable_state(
            optimizer, {names[number]: master for number, master in before.masters.items()}
        )
        groups = groups_of(self._optimizer)
        #: The parameter group of each tensor.
        self._group_of = {number: groups[id(each)] for number, each in before.masters.items() if id(each) in groups}
        if others := len(groups) - len(self._group_of):
            raise ValueError(
                f"the optimizer steps {others} tensors that are no parameters of the model's optimizer strategy"
            )
        for number, master in before.masters.items():
            if master.grad is not None:
                raise ValueError(f"{names[number]} has a gradient: call optimizer.zero_grad() before")
        self._states = {
            number: ParameterState(names[number], master, master, self._optimizer)
            for number, master in before.masters.items()
        }
        settings = settings_of(self._optimizer)
        self.plan = fingerprint(json.dumps([strategy.as_dict(), settings, list(nodes), max_bytes]))

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the optimizer's tensors before the move."""
        entries = [value for state in self._states.values() for _, _, value in state.entries()]
        return sum(value.numel() * value.element_size() for value in entries if isinstance(value, Tensor))

    def describe(self) -> str:
        described = [[number, asdict(state.description())] for number, state in self._states.items()]
        return json.dumps([self._group_of, described])

    def agree(self, descriptions: Iterable[str]) -> None:
        """Take what all ranks hold, and lay out the rounds; ranks that share a tensor must agree on it."""
        before, after, tensors = self._before, self._after, self._before.tensors
        self._agreed, self._group_of = _agreed(descriptions, tensors)
        plan = plan_weights(before.layout, after.layout, [tensor.spec for tensor in tensors], self._nodes)
        flows: list[Flow] = []
        self._moved: dict[str, Relocation] = {}  # by what they are to their parameter
        for what in sorted({what for known in self._agreed for what in known.dtypes}):
            dtypes = {number: known.dtype(what) for number, known in enumerate(self._agreed) if what in known.dtypes}
            held = {number: state.tensors[what] for number, state in self._states.items() if what in state.tensors}
            wanted = {number: dtype for number, dtype in dtypes.items() if number in after.masters}
            flows.append(Flow(plan.transfers, dtypes))
            self._moved[what] = Relocation(before, after, held, wanted)
        self.relocations = list(self._moved.values())
        self.flows = FlowRounds.of(flows, before, self._max_bytes)
        self.lay_out(self.flows.rounds)
        self.new_bytes = sum(relocation.new_bytes for relocation in self.relocations)

    def commit(self) -> None:
        """Put weights and state in place in the same parameter groups, and let go of the old ones."""
        if self._after is not self._before:
            self._after.fill_masters(self._moved[PARAMETER].tensors)
            self._before.let_go_of_masters()
        state: dict[int, dict[str, Any]] = {}
        for number, parameter in self._after.masters.items():
            state[number] = self._agreed[number].kept_values(parameter.device)
            for what, moved in self._moved.items():
                if what != PARAMETER and number in moved.tensors:
                    state[number][what.removeprefix(STATE)] = moved.tensors[number]
        if self._optimizer is None:
            return
        for parameter in self._before.masters.values():
            set_state(self._optimizer, parameter, {})
        for index, group in enumerate(self._optimizer.param_groups):
            numbers = [number for number in self._after.masters if self._group_of.get(number) == index]
            group["params"] = [self._after.masters[number] for number in numbers]
            if "param_names" in group:
                group["param_names"] = [self._after.tensors[number].spec.name for number in numbers]
        for number, values in state.items():
            if number in self._group_of:
                set_state(self._optimizer, self._after.masters[number], values)


def _agreed(texts: Iterable[str], tensors: Sequence[WholeTensor]) -> tuple[list[Description], dict[int, int]]:
    """What travels of each tensor, and in which of the optimizer's groups each is."""
    by_rank: list[list[Description]] = []
    group_of: dict[int, tuple[int, int | None]] = {}
    for rank, text in enumerate(texts):
        groups, described = json.loads(text)
        descriptions = {number: Description(**fields) for number, fields in described}
        by_rank.append(
            [descriptions.get(number, Description(tensor.spec.name, 0)) for number, tensor in enumerate(tensors)]
        )
        for number in descriptions:
            group = groups.get(str(number))
            other, there = group_of.setdefault(number, (rank, group))
            if there != group:
                raise RuntimeError(
                    f"{tensors[number].spec.name} is in parameter group {there} of the optimizer on rank {other} of "
                    f"the group, and in {group} on rank {rank}: give it the same groups on all ranks"
                )
    agreed_groups = {number: group for number, (_, group) in group_of.items() if group is not None}
    return agreed_descriptions(by_rank), agreed_groups
