"""torch.distributed.checkpoint (DCP) gets an optimizer's state by the names of the model's parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from zeroresize.checkpoints.checksums import Checksums
from zeroresize.checkpoints.divided_tensor import DividedTensor, TensorDivision
from zeroresize.layers.local_parts import local_of
from zeroresize.optim.optimizers import require_stepping, stepped_tensors, torch_optimizer, why_sharded
from zeroresize.resharding.parameter_state import StateKind, kind_of_state
from zeroresize.utils.codec import FORMAT, require_format
from zeroresize.utils.torch_private import drop_step_hooks

#: The name under which a checkpoint has an optimizer, and names within.
OPTIMIZER = "optimizer"
FORMAT_KEY, GROUPS, HAS_STATE, MASTER = "format", "param_groups", "has_state", "master_weight"
_OF_THE_MODEL = ("params", "param_names")


class OptimizerState:
    """Gives DCP the state of an optimizer, as a Stateful.

    Its state dictionary holds for every parameter that is stepped: ``has_state``, ``master_weight`` where the optimizer
    keeps one, tensors of the parameter's shape, divided as the parameter is, and numbers. A parameter without state
    gets what a step with a gradient of zero makes, so that every file has the same keys; ``has_state`` tells that it
    had none.

    Args:
        optimizer: a torch optimizer, or a host's wrapper of one.
        parameters: of the model, by name.
        divisions: of those of which this rank holds a part, by ``id``.
        checksums: are told of all that DCP is given to write.
    """

    def __init__(
        self,
        optimizer: Any,
        parameters: Mapping[str, Tensor],
        divisions: Mapping[int, TensorDivision],
        checksums: Checksums,
    ) -> None:
        self._optimizer, self._parameters, self._divisions = optimizer, dict(parameters), divisions
        self._checksums = checksums
        if (why := why_sharded(optimizer)) is not None:
            raise ValueError(f"sharded_state_dict: {why}")
        self._inner = torch_optimizer(optimizer)
        require_stepping(optimizer, parameters)
        stepped = {id(one) for one in self._stepped().values()}
        others = [one for group in self._inner.param_groups for one in group["params"] if id(one) not in stepped]
        if others:
            raise ValueError(
                f"sharded_state_dict: the optimizer steps {len(others)} tensors that are no parameters of the model "
                f"(the first has shape {tuple(others[0].shape)}), and their state would not be saved"
            )
        self._made: dict[str, dict[str, Any]] = {}
        self.state_dict()  # an error is told now
        self._made.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as it is now; see the class."""
        self._made.clear()
        # A tuple is one value for DCP, so groups with fewer keys can be loaded.
        groups = tuple(
            {key: _plain(value) for key, value in group.items() if key not in _OF_THE_MODEL}
            for group in self._inner.param_groups
        )
        parts = {name: self._of(name, tensor) for name, tensor in self._stepped().items()}
        self._checksums.note(f"{OPTIMIZER}.{GROUPS}", groups)
        for name, entries in parts.items():
            for key, value in entries.items():
                self._checksums.note(f"{OPTIMIZER}.{name}.{key}", value)
        return {FORMAT_KEY: FORMAT, GROUPS: groups, **parts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what DCP has loaded into a :meth:`state_dict`; tensors were loaded in place."""
        require_format(state_dict[FORMAT_KEY], "the checkpoint's optimizer")
        groups = state_dict[GROUPS]
        if len(groups) != len(self._inner.param_groups):
            raise ValueError(
                f"the checkpoint's optimizer has {len(groups)} parameter groups, and this one has "
                f"{len(self._inner.param_groups)}"
            )
        for group, loaded in zip(self._inner.param_groups, groups, strict=True):
            _update(group, loaded)
        for name, tensor in self._stepped().items():
            if not state_dict[name][HAS_STATE]:
                self._made.pop(name, None)
                self._inner.state.pop(tensor, None)
                continue
            self._install(name, tensor)
            loaded = {key: value for key, value in state_dict[name].items() if key not in (HAS_STATE, MASTER)}
            _update(self._inner.state[tensor], loaded)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "what zeroresize.sharded_state_dict returns is for torch.distributed.checkpoint only, and not within "
            "another dictionary: save other things as {**sharded_state_dict(model, optimizer), 'balancer': balancer}"
        )

    def _install(self, name: str, tensor: Tensor) -> None:
        """Give the optimizer the state that was made for what it had none of, unless it has got some in between.

        That is when a rank without units follows the others, whose units a Balancer has moved as it was loaded.
        """
        made = self._made.pop(name, None)
        if made and not self._inner.state.get(tensor):
            self._inner.state[tensor].update(made)  # the optimizer's own kind of dictionary

    def _stepped(self) -> dict[str, Tensor]:
        return stepped_tensors(self._optimizer, self._parameters)

    def _of(self, name: str, tensor: Tensor) -> dict[str, Any]:
        parameter = self._parameters[name]
        division = self._divisions.get(id(parameter))
        state = self._inner.state.get(tensor)
        entries: dict[str, Any] = {HAS_STATE: bool(state)}
        install = None
        if not state:
            state = self._made[name] = self._fresh(name, tensor)
            install = partial(self._install, name, tensor)  # before units move: a Balancer may be loaded first
        for key, value in state.items():
            kind = kind_of_state(key, value, tensor)
            if kind in (StateKind.PLAIN, StateKind.OTHER):
                entries[key] = value
            elif kind is StateKind.LIKE_PARAMETER:
                entries[key] = DividedTensor(f"{name}: {key}", value, division, self._checksums, install)
            elif kind is StateKind.NUMBER:
                entries[key] = value.item()
            elif division is None:
                entries[key] = DividedTensor(f"{name}: {key}", value, None, self._checksums)
            else:
                raise ValueError(
                    f"sharded_state_dict: the optimizer keeps {key!r} of shape {tuple(value.shape)} beside {name} of "
                    f"shape {tuple(tensor.shape)}, which is divided over ranks: only single numbers and tensors of "
                    "that shape can be saved"
                )
        if division is not None and not local_of(tensor).numel():  # numbers here are of nothing: others write theirs
            entries = {key: value if isinstance(value, Tensor) else _Unwritten() for key, value in entries.items()}
        if tensor is not parameter:
            entries[MASTER] = DividedTensor(f"{name}: {MASTER}", tensor, division, self._checksums)
        return entries

    def _fresh(self, name: str, tensor: Tensor) -> dict[str, Any]:
        """What the optimizer's first step would make for a tensor, by a copy that steps a copy."""
        group = next(group for group in self._inner.param_groups if any(one is tensor for one in group["params"]))
        stepping = object.__new__(type(self._inner))
        vars(stepping).update(vars(self._inner))
        drop_step_hooks(stepping)
        copied = torch.nn.Parameter(torch.zeros_like(tensor.data))
        copied.grad = torch.zeros_like(copied)
        stepping.state, stepping.param_groups = defaultdict(dict), [{**group, "params": [copied]}]
        try:
            type(self._inner).step(stepping)
        except Exception as error:
            raise ValueError(
                f"sharded_state_dict: {type(self._inner).__name__} has no state of {name} yet, and a step with a "
                f"gradient of zero does not make it ({error}): let it make a step before"
            ) from error
        return dict(stepping.state[copied])


class _Unwritten:
    """In place of a value that other ranks write; it can be loaded."""

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return []


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _update(known: Any, loaded: Mapping[str, Any]) -> None:
    """Numbers go where they were, a tensor or not; tensors are loaded already."""
    for key, value in loaded.items():
        current = known.get(key)
        if isinstance(current, Tensor):
            if not isinstance(value, Tensor):
                current.fill_(value)
        else:
            known[key] = value
