"""What the package needs of an optimizer: the torch optimizer inside a host's wrapper, and the tensors it steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroresize.utils.torch_private import is_initialized
from zeroresize.utils.torch_state import remove_all


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return ``optimizer`` itself, or the one inside Colossal-AI's or Accelerate's wrappers."""
    inner = optimizer
    while not isinstance(inner, torch.optim.Optimizer) or _only_wraps(inner):
        inner = getattr(inner, "optimizer" if isinstance(inner, torch.optim.Optimizer) else "optim", None)
        if inner is None:
            raise ValueError(
                f"{type(optimizer).__name__} is no torch.optim.Optimizer and has none as its .optim: moving units, "
                "sharded_state_dict, pruned_update='freeze' and priority='path_length' need one"
            )
    return inner


def _only_wraps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is an optimizer by its class alone, which has another one do its work, such as Accelerate's."""
    return not is_initialized(optimizer) and hasattr(optimizer, "optimizer")


def stepped_tensors(optimizer: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the optimizer updates for each named parameter: the parameter itself or its fp32 master copy.

    Parameters that it does not update (frozen, or of another optimizer) are left out.
    """
    stepped = _ids_of_stepped(torch_optimizer(optimizer))
    masters = _masters(optimizer)
    steppers = {}
    for name, parameter in parameters.items():
        tensor = masters.get(id(parameter), parameter)
        if id(tensor) not in stepped:
            continue
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"{name}: the optimizer keeps it as {tuple(tensor.shape)} instead of {tuple(parameter.shape)}, as "
                "ZeRO's shards do; moving units, sharded_state_dict, pruned_update='freeze' and priority='path_length' "
                "need whole parameters"
            )
        steppers[name] = tensor
    return steppers


class SteppedTensors:
    """Tells what :func:`stepped_tensors` returns, also for parameters that an optimizer is given later."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
        self._optimizer, self._parameters = optimizer, dict(parameters)
        self._inner = torch_optimizer(optimizer)
        self._num_stepped = -1
        self._tensors: dict[str, Tensor] = {}
        self.now()

    def now(self) -> dict[str, Tensor]:
        """Return what :func:`stepped_tensors` returns at present."""
        num_stepped = sum(len(group["params"]) for group in self._inner.param_groups)
        if num_stepped != self._num_stepped:
            self._tensors = stepped_tensors(self._optimizer, self._parameters)
            self._num_stepped = num_stepped
        return self._tensors


def hook_steps(
    optimizer: Any, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> Callable[[], object]:
    """Call methods of one object before and after every step; ends when the result is called or the object dies."""
    inner = torch_optimizer(optimizer)
    registered = ((inner.register_step_pre_hook, before), (inner.register_step_post_hook, after))
    given = [(register, method) for register, method in registered if method is not None]
    hooks = [register(_calling(weakref.WeakMethod(method))) for register, method in given]
    unhook = weakref.finalize(given[0][1].__self__, remove_all, hooks)  # type: ignore[attr-defined]
    unhook.atexit = False
    return unhook


def _calling(method: weakref.WeakMethod[Callable[[], None]]) -> Callable[..., None]:
    def call(*_: Any) -> None:
        alive = method()
        if alive is not None:
            alive()

    return call


def not_stepped(optimizer: Any, parameters: Mapping[str, Tensor]) -> list[str]:
    """Name parameters that require gradients and that ``optimizer`` does not step; none where that is unknown.

    It is unknown where a host's wrapper keeps all parameters in a form of its own.
    """
    try:
        stepped = _ids_of_stepped(torch_optimizer(optimizer))
    except ValueError:
        return []
    masters = _masters(optimizer)
    learning = [name for name, one in parameters.items() if one.requires_grad]
    unknown = [name for name in learning if not stepped & {id(parameters[name]), id(masters.get(id(parameters[name])))}]
    is_wrapped = not isinstance(optimizer, torch.optim.Optimizer)
    return [] if is_wrapped and len(unknown) == len(learning) else unknown


def require_stepping(optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
    """Check that an optimizer steps all parameters that are to move, or be saved, with what it keeps for them."""
    why = None if optimizer is None else why_others_step(not_stepped(optimizer, parameters))
    if why is not None:
        raise ValueError(why)


def why_others_step(missing: Sequence[str]) -> str | None:
    """Tell why parameters may not move with an optimizer that does not step some that want gradients."""
    if not missing:
        return None
    return (
        f"the optimizer does not step {len(missing)} of the model's parameters that want gradients "
        f"({', '.join(missing[:3])}{', …' if missing[3:] else ''}), and what another one keeps for them would be lost: "
        "make it from all parameters that the model has now, those of other stages of a pipeline included, or freeze "
        "these (requires_grad_(False))"
    )


def stepped_gradients(optimizer: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients that a step would use now of named parameters, or of their master copies; where it has any.

    A master copy may be a flat shard; of a sparse gradient only its values are returned.
    """
    stepped, masters = _ids_of_stepped(torch_optimizer(optimizer)), _masters(optimizer)
    gradients = {}
    for name, parameter in parameters.items():
        tensor = masters.get(id(parameter), parameter)
        if id(tensor) in stepped and tensor.grad is not None:
            gradients[name] = tensor.grad.coalesce().values() if tensor.grad.is_sparse else tensor.grad
    return gradients


def states_like(optimizer: torch.optim.Optimizer, tensor: Tensor) -> Iterable[Tensor]:
    """Return the optimizer's state tensors of ``tensor`` that have its shape, such as its moments."""
    state = optimizer.state.get(tensor, {})
    return [value for value in state.values() if isinstance(value, Tensor) and value.shape == tensor.shape]


def _ids_of_stepped(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}


def _masters(optimizer: Any) -> Mapping[int, Tensor]:
    """Master copies by the ``id`` of the working parameter, as Colossal-AI's wrappers tell; empty for others."""
    get_map = getattr(optimizer, "get_working_to_master_map", None)
    return (get_map() if callable(get_map) else None) or {}
