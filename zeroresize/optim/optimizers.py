"""What the package needs of an optimizer: the torch optimizer inside a host's wrapper, and the tensors it steps."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroresize.utils.torch_private import is_initialized
from zeroresize.utils.torch_state import remove_all

#: Wrappers' lists of groups of working parameters, and of their master copies: Megatron-Core's and DeepSpeed's.
_GROUPS = (("float16_groups", "fp32_from_float16_groups"), ("fp16_groups", "fp32_groups"))
#: Packages whose wrappers of optimizers have it as their ``optim`` or ``optimizer``, and scale and clip.
_WRAPPING = {"colossalai", "megatron", "deepspeed", "accelerate"}
#: Optimizers of which each data-parallel rank keeps and steps another part, by their packages; what takes them apart.
SHARDED: Mapping[tuple[str, str], str | None] = {
    ("torch", "ZeroRedundancyOptimizer"): None,
    ("colossalai", "LowLevelZeroOptimizer"): "zeroresize.integrations.colossalai_zero:ShardedByColossalai",
    ("deepspeed", "BF16_Optimizer"): None,
    ("deepspeed", "DeepSpeedZeroOptimizer"): "zeroresize.integrations.deepspeed:ShardedByDeepSpeed",
    ("deepspeed", "DeepSpeedZeroOptimizer_Stage3"): None,
    ("megatron", "DistributedOptimizer"): "zeroresize.integrations.megatron_buffers:ShardedByMegatron",
    ("megatron", "LayerWiseDistributedOptimizer"): None,
}


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return ``optimizer`` itself, or the one inside a host's wrappers: Colossal-AI's, Accelerate's, Megatron-Core's,
    DeepSpeed's.
    """
    *_, inner = with_inner(optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is no torch.optim.Optimizer and has none as its .optim or .optimizer: moving "
            "units, sharded_state_dict, pruned_update='freeze' and priority='path_length' need one"
        )
    return inner


def why_sharded(optimizer: Any) -> str | None:
    """Tell what an optimizer is that is several, or of which replicas keep different parts; None if it is neither."""
    try:
        kinds = [kind for each in with_inner(optimizer) for kind in kinds_of(each)]
    except ValueError as several:
        return str(several)
    name = next((name for root, name in kinds if (root, name) in SHARDED), None)
    return None if name is None else f"the optimizer is a {name}, whose replicas keep different parts of its state"


def require_stepped(optimizer: Any, weights: Mapping[str, Tensor], purpose: str) -> None:
    """Check that an optimizer steps layers' weights, whole ones on every rank, which ``purpose`` needs."""
    reason = why_sharded(optimizer)
    learning = [name for name, weight in weights.items() if weight.requires_grad]
    if reason is None and learning and not stepped_tensors(optimizer, weights):
        reason = f"{type(optimizer).__name__} steps neither the weight of {learning[0]}, nor a copy, nor any layer's"
    if reason is not None:
        raise ValueError(f"{purpose} needs an optimizer that steps whole weights of the layers on every rank: {reason}")


def kinds_of(wrapper: Any) -> list[tuple[str, str]]:
    """Return the package and the name of its class and of those that this is made of."""
    return [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(wrapper).__mro__]


def is_of_host(optimizer: Any) -> bool:
    """Return whether an optimizer, or a wrapper of one, is of a host that is known."""
    return any(root in _WRAPPING for root, _ in kinds_of(optimizer))


def _held_by(wrapper: Any) -> Any:
    """What a wrapper of an optimizer holds; None if nothing is known of it."""
    if isinstance(wrapper, torch.optim.Optimizer):
        return getattr(wrapper, "optimizer", None)
    held = getattr(wrapper, "optim", None)
    if held is not None or not is_of_host(wrapper) or not hasattr(wrapper, "zero_grad"):  # as a scheduler
        return held
    chained = getattr(wrapper, "chained_optimizers", None)
    if chained is not None and len(chained) != 1:
        kinds = ", ".join(type(each).__name__ for each in chained)
        raise ValueError(
            f"{type(wrapper).__name__} holds {len(chained)} optimizers ({kinds}), and is taken with one only: units "
            "move where one optimizer steps all of their layers"
        )
    return getattr(wrapper, "optimizer", None) if chained is None else chained[0]


def with_inner(optimizer: Any) -> list[Any]:
    """Return ``optimizer``, what it wraps, and so on to the one that steps; ValueError where a wrapper has several."""
    inner = [optimizer]
    while not isinstance(inner[-1], torch.optim.Optimizer) or _only_wraps(inner[-1]):
        if (held := _held_by(inner[-1])) is None:
            break
        inner.append(held)
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
    """Call methods of one object before and after every step; ends when the result is called or the object dies.

    A step that is given a closure begins, for ``before``, when the closure was called first.
    """
    inner, hooks = torch_optimizer(optimizer), list[Any]()
    if before is not None:
        begin = _calling(before)
        hooks.append(inner.register_step_pre_hook(lambda _, *given: call_before_step(begin, *given)))
    if after is not None:
        hooks.append(inner.register_step_post_hook(_calling(after)))
    method: Any = before or after
    unhook = weakref.finalize(method.__self__, remove_all, hooks)
    unhook.atexit = False
    return unhook


def _calling(method: Callable[[], None]) -> Callable[..., None]:
    reference = weakref.WeakMethod(method)

    def call(*_: Any) -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


def call_before_step(
    call: Callable[[], object], args: tuple[Any, ...], options: dict[str, Any], *, is_repeated: bool = False
) -> Any:
    """Make a call as a hook before a step, and return what the step is given then; None for ``args`` and ``options``.

    Args:
        is_repeated: whether it is made behind each call of the closure, where the step is given one; else the first.
    """
    of_step, *given = args
    closure = given[0] if given else options.get("closure")
    if closure is None:
        return call()
    calls = itertools.chain([call], itertools.repeat(call if is_repeated else lambda: None))

    def behind() -> Any:
        loss = closure()
        next(calls)()
        return loss

    return ((of_step, behind, *given[1:]), options) if given else (args, options | {"closure": behind})


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
    """Master copies by the ``id`` of the working parameter, as hosts' wrappers tell; empty for others."""
    masters: dict[int, Tensor] = {}
    for each in with_inner(optimizer):
        get_map = getattr(each, "get_working_to_master_map", None)
        masters |= (get_map() if callable(get_map) else None) or {}
        for names in _GROUPS:
            if all(hasattr(each, name) for name in names):
                working, copies = (list(itertools.chain(*getattr(each, name))) for name in names)
                if len(copies) != len(working):
                    raise ValueError(
                        f"{type(each).__name__} has {len(working)} parameters in {names[0]} and {len(copies)} master "
                        f"copies in {names[1]}: wanted is a copy of each"
                    )
                masters |= dict(zip(map(id, working), copies, strict=True))
    return masters
