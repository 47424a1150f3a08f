"""DistributedDataParallel around parameters that change their shapes: its reducer is dropped before and built anew.

A reducer's buckets have fixed shapes, and its hooks hold on to gradient accumulators, which remember a shape, too.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

#: What was found around models; modules hash by identity.
_around: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[DistributedDataParallel]] = weakref.WeakKeyDictionary()
_BUILD = ("parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph")


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside Booster's or DDP's wrappers, so that layer names do not depend on them."""
    inner = getattr(model, "unwrap", None)
    model = inner() if callable(inner) else model
    return model.module if isinstance(model, DistributedDataParallel) else model


def wrappers_of(model: nn.Module) -> tuple[DistributedDataParallel, ...]:
    """The DistributedDataParallel modules in ``model`` and those around it or around a part of it.

    The ones around it are found by looking at all objects of this process, which takes tenths of a second: at the first
    call for a model only.
    """
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if model not in _around:
        _around[model] = weakref.WeakSet(_found_around(model))
    return (*found, *(wrapper for wrapper in _around[model] if not any(wrapper is one for one in found)))


def _found_around(model: nn.Module) -> list[DistributedDataParallel]:
    parts = set(map(id, model.modules()))
    # Not isinstance(): some objects' __class__ is computed, with side effects.
    wrappers = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    return [one for one in wrappers if "reducer" in vars(one) and parts & set(map(id, one.module.modules()))]


def require_rebuildable(wrappers: Sequence[DistributedDataParallel]) -> None:
    """Check that :func:`rebuild_reducers` will work.

    Raises:
        RuntimeError: for a wrapper whose reducer cannot be built anew: with mixed precision, one all-reduce of all
            gradients, a built-in communication hook, an optimizer in backward, or under a torch that builds reducers
            differently.
    """
    for wrapper in wrappers:
        reason = _reason_against(wrapper)
        if reason is not None:
            raise RuntimeError(
                f"parameters inside a {type(wrapper).__name__} cannot change their shapes, since its reducer cannot be "
                f"built anew: {reason}"
            )


def drop_reducers(wrappers: Sequence[DistributedDataParallel]) -> None:
    """Take the reducers' hooks off, so that nothing holds on to the parameters' old shapes."""
    for wrapper in wrappers:
        parts: Any = wrapper
        parts.reducer._remove_autograd_hooks()
        parts.reducer = parts.logger = None


def rebuild_reducers(wrappers: Sequence[DistributedDataParallel]) -> None:
    """Build what :func:`drop_reducers` has taken, for the parameters as they are now; no collective.

    Every replica must do so before the same step.
    """
    for wrapper in wrappers:
        parts: Any = wrapper  # torch's own names
        parameters, expects_sparse = parts._build_params_for_reducer()
        names = parts._build_debug_param_to_name_mapping(parameters)
        parts._ddp_init_helper(parameters, expects_sparse, names, parts.static_graph)
        parts._has_rebuilt_buckets = False
        hooks, parts._comm_hooks = parts._comm_hooks, []
        for hook, state in hooks:
            parts.register_comm_hook(state, hook)
        if parts.static_graph:
            parts._static_graph_delay_allreduce_enqueued = False
            parts.reducer._set_static_graph()
            parts.logger._set_static_graph()


def _reason_against(wrapper: Any) -> str | None:
    if getattr(wrapper, "mixed_precision", None) is not None:
        return "it was made with mixed_precision"
    if getattr(wrapper, "_delay_all_reduce_all_params", False):
        return "it reduces all gradients at once (delay_all_reduce_named_params)"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in wrapper.module.parameters()):
        return "its optimizer steps in backward"
    builders = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper")
    is_known = all(callable(getattr(wrapper, name, None)) for name in builders)
    if not is_known or tuple(inspect.signature(wrapper._ddp_init_helper).parameters) != _BUILD:
        return "this version of torch builds reducers differently"
    hook = wrapper._get_ddp_logging_data().get("comm_hook", "")
    if hook and not wrapper._comm_hooks:
        return f"it has the built-in communication hook {hook}"
    return None
