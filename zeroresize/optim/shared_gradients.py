"""Each step begins by handing gradients of rows that several ranks hold from the first of these ranks to the others.

It ends by taking them back, so that whatever reads or adds to gradients until they are zeroed counts each once.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zeroresize.comm.collectives import all_reduce
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.shared_rows import SharedRows
from zeroresize.layers.weight_checks import known_layers
from zeroresize.optim.independence import steps_by_place
from zeroresize.optim.optimizers import call_before_step, stepped_tensors, torch_optimizer
from zeroresize.utils.torch_private import parameters_of

#: Hosts' wrappers of optimizers, which know what these step in place of parameters.
_hosts: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()


@cache
def hand_out_gradients() -> None:
    """Let all optimizers of torch step copies of rows by one gradient, from now on."""

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return call_before_step(partial(_hand_out, optimizer), args, options, is_repeated=True)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(lambda optimizer, *_: _take_back(optimizer))


def tell_host_of(optimizer: Any) -> None:
    """Make known what a host's wrapper of an optimizer has it step; the last wrapper that is told of counts."""
    _hosts[torch_optimizer(optimizer)] = weakref.ref(optimizer)


@torch.no_grad()
def _hand_out(optimizer: Optimizer) -> None:
    """Send all that is apart in one message of each kind.

    An optimizer that steps within another one's step, such as a shard of ZeRO's, finds it handed out.
    """
    apart = [each for each in _apart(optimizer) if each.name not in each.rows.handed_out]
    if apart and steps_by_place(optimizer):
        raise RuntimeError(
            f"several ranks hold rows of layer {apart[0].layer.name_in_model}, and {type(optimizer).__name__} may step "
            "them otherwise by where they lie, as fused kernels on the CPU do: use fused=False, or "
            "zeroresize.mark_elementwise where it does not"
        )
    messages: dict[Any, list[_Apart]] = {}
    for each in apart:
        messages.setdefault((each.layer.process_group, each.gradient.dtype, each.gradient.device), []).append(each)
    for (process_group, *_), parts in messages.items():
        held = [each.rows.held_first(each.gradient) for each in parts]
        message = torch.cat([part.flatten() for part in held])
        all_reduce(message, process_group)
        wholes = message.split([part.numel() for part in held])
        for each, part, whole in zip(parts, held, wholes, strict=True):
            each.rows.put(each.gradient, whole.view_as(part))
            each.rows.handed_out.add(each.name)


@torch.no_grad()
def _take_back(optimizer: Optimizer) -> None:
    for each in _apart(optimizer):
        each.rows.put(each.gradient, None)
        each.rows.handed_out.discard(each.name)


@dataclass(frozen=True)
class _Apart:
    """A parameter of a layer whose rows several ranks hold, and its gradient [N, ...] of a step."""

    layer: Any
    name: str
    rows: SharedRows
    gradient: Tensor


def _apart(optimizer: Optimizer) -> list[_Apart]:
    """Return those that an optimizer steps; alike on all ranks."""
    layers = [layer for layer in known_layers() if layer.shared_rows is not None]
    if not layers:
        return []
    layers.sort(key=lambda layer: (layer.name_in_model, int(layer.forwards.number)))
    host = (_hosts[optimizer]() if optimizer in _hosts else None) or optimizer
    named = [
        (layer, name, parameter)
        for layer in layers
        for name, parameter in parameters_of(layer).items()
        if parameter is not None and (name == "weight" or layer.is_column_parallel)
    ]
    stepped = stepped_tensors(host, {str(number): parameter for number, (*_, parameter) in enumerate(named)})
    apart = []
    for number, (layer, name, _) in enumerate(named):
        tensor = stepped.get(str(number))
        if tensor is not None and tensor.grad is not None:
            if layer.is_sharded_further(tensor):
                raise RuntimeError(
                    f"several ranks hold rows of layer {layer.name_in_model}, and fully_shard has divided their "
                    "gradients further, so that they cannot be summed: let ranks own whole groups of units"
                )
            gradient, is_transposed = local_of(tensor.grad), name == "weight" and layer.weight_is_transposed
            apart.append(_Apart(layer, name, layer.shared_rows, gradient.t() if is_transposed else gradient))
    return apart
