"""No uneven shard gets into a file, or out of one, by accident.

``state_dict()`` and ``load_state_dict()`` are errors while units are away from home. ``save_pretrained()`` always is
where it would write this rank's shards as if they were the model: without a state, or with this rank's.
"""

from __future__ import annotations

import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zeroresize.comm.collectives import group_rank
from zeroresize.integrations.lora import base_of, is_lora, why_not_whole
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segment import OwnedSegment
from zeroresize.layers.splitting import whole_of_ranks
from zeroresize.optim.optimizers import torch_optimizer, with_inner
from zeroresize.resharding.agreement import agreed, make_alike, meet_over
from zeroresize.resharding.data_parallel import sharded_optimizer
from zeroresize.utils.torch_private import buffers_of, is_dtensor, parameters_of
from zeroresize.utils.torch_state import remove_all

_SAVING = (
    "which no other number of ranks, and no model that is not balanced, could load. Save with all units at home, "
    "`with balancer.at_home(): ...` on every rank of the group, or let torch.distributed.checkpoint save "
    "`zeroresize.sharded_state_dict(model, optimizer)`, which holds any division"
)
_LOADING = (
    "which the state of even shards does not fit. Load with all units at home, `with balancer.at_home(): ...` on every "
    "rank of the group, or let torch.distributed.checkpoint load into `zeroresize.sharded_state_dict(model, optimizer)`"
)
_AT_HOME = "have all units at home for that, `with balancer.at_home(): ...` on every rank of the group"


def guard_modules(segments: Iterable[OwnedSegment]) -> None:
    """Let layers that hold a segment's parameters save and load no state while units are away; copies of them, too."""
    for segment in segments:
        owners: set[Any] = {tensor.owner for tensor in segment.tensors if isinstance(tensor.owner, BalancedLinear)}
        for owner in owners:
            owner.register_state_dict_pre_hook(_before_saving)
            owner.register_load_state_dict_pre_hook(_before_loading)


def guard_save_pretrained(model: nn.Module) -> None:
    """Let nothing write shards by ``save_pretrained``, or LoRA merge into layers whose units are away; copies too."""
    for module in model.modules():
        # Methods: that of a copy is the copy's.
        if callable(getattr(type(module), "save_pretrained", None)):
            vars(module)["save_pretrained"] = types.MethodType(_save_pretrained, module)
        if is_lora(module) and isinstance(base_of(module), BalancedLinear):
            vars(module)["merge"] = types.MethodType(_merge, module)


def _merge(wrapper: Any, *args: Any, **options: Any) -> Any:
    layer: Any = wrapper.base_layer
    layer.require_home("merge() of LoRA into")
    if layer.has_dtensors:
        why = "whose weight is a DTensor, to which PEFT cannot add: save the adapter, and merge in the undivided model"
        raise RuntimeError(f"merge() of LoRA into {layer.name_in_model}, {why}")
    return type(wrapper).merge(wrapper, *args, **options)


def _save_pretrained(model: Any, *args: Any, **options: Any) -> Any:
    save = type(model).save_pretrained
    bound = inspect.signature(save).bind(model, *args, **options)
    state = bound.arguments.get("state_dict", options.get("state_dict"))
    shard = None if state is None else _first_shard_in(state, model)
    layers = [module for module in model.modules() if isinstance(module, BalancedLinear)]
    is_peft = save.__module__.startswith("peft.")
    if state is None and (is_peft or all(layer.has_dtensors for layer in layers)):
        uneven = next(filter(None, map(_uneven, layers)), None)
        if uneven is not None:
            raise RuntimeError(f"{type(model).__name__}.save_pretrained(): a layer {uneven}, {_SAVING}")
        if layers and is_peft:
            return _save_adapters(model, layers[0], partial(save, model, *args, **options), bound.arguments)
        if layers and not _gathers_dtensors(save):
            state = model.state_dict()
            whole = {name: tensor.full_tensor() if is_dtensor(tensor) else tensor for name, tensor in state.items()}
            bound.arguments["state_dict"] = whole
            return save(*bound.args, **bound.kwargs) if group_rank(layers[0].process_group) == 0 else None
    elif state is None or shard is not None:
        raise RuntimeError(
            f"{type(model).__name__}.save_pretrained() would write this rank's shards of the layers as if they were "
            f"the whole model{'' if shard is None else f' (given is {shard})'}. Let "
            "torch.distributed.checkpoint save zeroresize.sharded_state_dict(model), which holds whole tensors, load "
            "that into the model that is not split, and save it there; or pass whole tensors as state_dict="
        )
    return save(model, *args, **options)


def _save_adapters(model: Any, layer: Any, save: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Let the first rank save a model's adapters at home, as PEFT does, with whole tensors; collective."""
    if any(hasattr(module, "_tp_info") for module in model.modules()):
        text = "gathers of all ranks what is whole already, as with transformers 5.4 to 5.16: use 5.24"
        raise RuntimeError(f"{type(model).__name__}.save_pretrained() {text}, or zeroresize.sharded_state_dict")
    if (why := why_not_whole(model)) is not None:
        raise RuntimeError(f"{type(model).__name__}.save_pretrained() would write a rank's part as the whole: {why}")
    state = model.state_dict()
    meet = meet_over(layer.process_group, layer.local_weight.device)
    names = make_alike(meet, lambda: _names_in_adapters(model, state, arguments), list, "what adapters' files hold")
    layers = dict(model.named_modules(remove_duplicate=False))
    whole = {name: _whole(state[name], layers.get(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names}
    is_writer = group_rank(layer.process_group) == 0
    agreed(meet, lambda: save(state_dict=whole) if is_writer else None, what="adapters' files")


def _names_in_adapters(model: Any, state: Mapping[str, Any], arguments: Mapping[str, Any]) -> Sequence[str]:
    """Of all that a model holds what PEFT would write, chosen of numbers that stand for these."""
    choose: Any = sys.modules["peft"].get_peft_model_state_dict
    numbers = {name: torch.tensor(number) for number, name in enumerate(state)}
    embeddings = arguments.get("save_embedding_layers", "auto")
    wanted = {
        int(number)
        for adapter in arguments.get("selected_adapters") or model.peft_config
        if adapter in model.peft_config
        for number in choose(model, numbers, adapter, save_embedding_layers=embeddings).values()
        if number.dim() == 0
    }
    return [name for number, name in enumerate(state) if number in wanted]


def _whole(tensor: Any, layer: Any, key: str) -> Any:
    """What all ranks hold together at home of a tensor, by that name in its layer; collective."""
    if is_dtensor(tensor):
        return tensor.full_tensor()
    is_divided = isinstance(layer, BalancedLinear) and key in layer.unit_dims
    return whole_of_ranks(tensor, layer.unit_dims[key], layer) if is_divided else tensor


def _gathers_dtensors(save: Any) -> bool:
    """Whether a library's ``save_pretrained`` does so itself: transformers from version 5 on."""
    library = sys.modules.get("transformers")
    is_old = library is not None and library.__version__.startswith("4.")
    return not (is_old and save.__module__.startswith("transformers."))


def _first_shard_in(state: Mapping[str, Any], model: nn.Module) -> str | None:
    """A tensor of a parallel layer that ``state`` has as a rank's part: name and shape, and the size of the whole."""
    names: set[str] = set()  # of all that is in the model
    divided: dict[str, tuple[int, int, tuple[int, int]]] = {}  # along which dimension, its size, and those of parts
    for prefix, module in model.named_modules(remove_duplicate=False):
        full_names = {key: f"{prefix}.{key}".lstrip(".") for key in (*parameters_of(module), *buffers_of(module))}
        names.update(full_names.values())
        if isinstance(module, BalancedLinear):
            of_units = module.divided_dim
            sizes = module.whole_size, (module.home_shape[of_units], module.local_weight.shape[of_units])
            dims = {key: dim for key, dim in module.unit_dims.items() if key in full_names}
            divided.update({full_names[key]: (dim, *sizes) for key, dim in dims.items()})
    for name, tensor in state.items():
        shape, parts = getattr(tensor, "shape", ()), name.split(".")
        # A wrapper's state has longer names, such as "module.…" and "_orig_mod.…".
        ends = (".".join(parts[at:]) for at in range(len(parts)))
        dim, whole, of_parts = divided.get(next((end for end in ends if end in names), name), (0, 0, ()))
        if dim < len(shape) and shape[dim] != whole and shape[dim] in of_parts:
            return f"{name} of shape {tuple(shape)}, of which all ranks together have {whole} in dimension {dim}"
    return None


def guard_optimizer(optimizer: Any, are_away: Callable[[], bool]) -> Callable[[], None]:
    """Let the optimizer save and load no state while units are away; returns what takes that back.

    A host's ``sharded_state_dict`` may ask for it, which saves by what layers tell of their units.
    """
    try:
        inner = torch_optimizer(optimizer)
    except ValueError:  # a wrapper that hides it
        return lambda: None
    alive, saving = weakref.WeakMethod(are_away), list[Any]()
    for wrapper in with_inner(optimizer):
        if callable(save := getattr(wrapper, "sharded_state_dict", None)):
            vars(wrapper)["sharded_state_dict"] = partial(_save_sharded, save, wrapper, saving)

    def refuse(call: str, remedy: str) -> None:
        if not saving and (ask := alive()) is not None and ask():
            raise RuntimeError(f"{call}: its state is of unevenly divided layers, {remedy}")

    handles = list[Any]()

    def ask_before(holder: Any, name: str, call: str) -> None:
        earlier, method = vars(holder).get(name), getattr(holder, name)

        def guarded(*args: Any, **options: Any) -> Any:
            refuse(call, _AT_HOME)
            return method(*args, **options)

        def remove() -> None:
            if vars(holder).get(name) is guarded:
                del vars(holder)[name]
                vars(holder).update({} if earlier is None else {name: earlier})

        vars(holder)[name] = guarded
        handles.append(SimpleNamespace(remove=remove))

    for wrapper in with_inner(optimizer):  # Colossal-AI's checkpoints begin by these
        if hasattr(wrapper, "get_master_to_working_map"):
            ask_before(wrapper, "get_master_to_working_map", "a checkpoint of the optimizer")
            ask_before(wrapper, "state_dict", "optimizer.state_dict()")
        if hasattr(model := getattr(wrapper, "model", None), "_force_wait_all_gather"):
            ask_before(model, "_force_wait_all_gather", "a checkpoint of the model")

    handles += (
        inner.register_state_dict_pre_hook(lambda _: refuse("optimizer.state_dict()", _SAVING)),
        inner.register_load_state_dict_pre_hook(lambda *_: refuse("optimizer.load_state_dict()", _LOADING)),
    )
    return partial(remove_all, handles)


def _save_sharded(save: Callable[..., Any], wrapper: Any, saving: list[Any], *args: Any, **options: Any) -> Any:
    kind = (options.get("metadata") or {}).get("distrib_optim_sharding_type")
    is_by_weights = sharded_optimizer(wrapper) is None or kind == "fully_reshardable"  # not by places in buffers
    saving += [save] * is_by_weights
    try:
        return save(*args, **options)
    finally:
        del saving[len(saving) - is_by_weights :]


def _before_saving(module: Any, prefix: str, keep_vars: bool) -> None:
    if (division := _uneven(module)) is not None:
        raise RuntimeError(f"state_dict(): {prefix.rstrip('.') or 'the layer'} {division}, {_SAVING}")


def _before_loading(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
    if (division := _uneven(module)) is not None:
        raise RuntimeError(f"load_state_dict(): {prefix.rstrip('.') or 'the layer'} {division}, {_LOADING}")


def _uneven(layer: Any) -> str | None:
    """How a layer is divided if its units are away."""
    segment: OwnedSegment | None = layer.segment
    if layer.is_home:
        return None
    if segment is None:
        shapes = f"{tuple(layer.local_weight.shape)} for {tuple(layer.home_shape)}"
        return f"is a copy of an unevenly divided layer ({shapes})"
    return f"is divided unevenly ({', '.join(map(str, segment.counts))} {segment.kind})"
