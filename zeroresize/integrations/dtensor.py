"""Models that torch's ``parallelize_module``, or transformers, has split: ``nn.Linear`` layers of DTensors.

A style of torch, or of transformers 4, leaves two hooks on a layer: one makes x a DTensor, the other makes y what the
style says. One of transformers 5 replaces the layer's forward. A balanced layer does all that itself, so that these are
taken off. What they do is read from what they remember; a layer with other ones stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zeroresize.comm.collectives import require_group
from zeroresize.integrations.changed_modules import remembered_by
from zeroresize.integrations.hosts import GATHERED
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.dtensor_linear import LinearLayouts, become_dtensor_linear
from zeroresize.layers.splitting import why_no_plain_linear
from zeroresize.utils.torch_private import hooks_of

#: Where the styles are defined whose hooks are read, and whether their row-parallel layers add the whole bias at once.
_STYLES_WITH_HOOKS = {
    "torch.distributed.tensor.parallel.style": False,
    "transformers.integrations.tensor_parallel": True,
}
#: Where those are defined that replace the forward.
_STYLES_WITH_FORWARDS = ("transformers.distributed.tensor_parallel",)
#: Their names, and whether what they make is column-parallel.
_KINDS = {"ColwiseParallel": True, "RowwiseParallel": False}


class _Unknown(Exception):
    """Raised where it is not known how a layer was split; the reason is its text."""


class _Style(NamedTuple):
    """What a style does to a layer, and what takes its hooks, or its forward, off."""

    name: str
    layouts: LinearLayouts
    take_off: Callable[[], object]

    @property
    def is_column(self) -> bool:
        return _KINDS[self.name]


def is_parallel_linear(module: nn.Module) -> bool:
    """Tell whether ``module`` is a linear layer of DTensors, split by something that remembers the mesh."""
    return isinstance(module, nn.Linear) and isinstance(module.weight, DTensor) and _mesh_of(module) is not None


def process_group_of(module: Any) -> ProcessGroup:
    """Return the group of the mesh over which a style has split ``module``."""
    mesh = _mesh_of(module)
    assert mesh is not None
    return require_group(mesh)


def why_left_alone(module: Any) -> str | None:
    """Tell why a layer that was split must stay as it is; None if it can be balanced."""
    try:
        style = _style(module)
    except _Unknown as unknown:
        return str(unknown)
    placements, wanted = module.weight.placements[-1:], Shard(0 if style.is_column else 1)
    if placements != (wanted,):  # fully_shard puts its dimension before
        return f"its weight has the placements {module.weight.placements}, and {style.name} makes {wanted!r}"
    if (why := why_no_plain_linear(module, but_for_forward=True)) is not None:
        return why
    layouts, is_column = style.layouts, style.is_column
    if is_column and layouts.y.is_replicate():
        return GATHERED
    if is_column and not layouts.y.is_shard(-1):
        return f"output_layouts={layouts.y} of a column-parallel layer are not known: allowed are Shard(-1)"
    if not is_column and not (layouts.x.is_shard(-1) or layouts.x.is_replicate()):
        return f"input_layouts={layouts.x} of a row-parallel layer are not known: allowed are Shard(-1), Replicate()"
    return None


def swap_layer(module: Any) -> Any:
    """Make ``module`` a balanced layer in place, without what its style has put on it, and return it."""
    if isinstance(module, BalancedLinear):
        return module
    style = _style(module)
    style.take_off()
    return become_dtensor_linear(module, style.layouts, is_column=style.is_column)


def _mesh_of(module: nn.Module) -> DeviceMesh | None:
    """The one-dimensional mesh that a hook, or a forward, remembers."""
    if isinstance(module, BalancedLinear):
        return None
    hooks = [*hooks_of(module, "forward_pre").values(), *hooks_of(module, "forward").values()]
    for function in (vars(module).get("forward"), *hooks):
        remembered = remembered_by(function)
        mesh = remembered.get("device_mesh", remembered.get("mesh"))
        if isinstance(mesh, DeviceMesh):
            has_tp = "tp" in (mesh.mesh_dim_names or ())
            return mesh if mesh.ndim == 1 else mesh["tp"] if has_tp else None
    return None


def _style(module: Any) -> _Style:
    """What was done to a layer."""
    return _style_with_forward(module) if "forward" in vars(module) else _style_with_hooks(module)


def _style_with_forward(module: Any) -> _Style:
    remembered = remembered_by(vars(module)["forward"])
    style, original = remembered.get("self"), remembered.get("original_forward")
    file, name = type(style).__module__, type(style).__name__
    if file not in _STYLES_WITH_FORWARDS or name not in _KINDS:
        raise _Unknown(f"how it was split is not known: its forward was replaced by one of {file}.{name}")
    if getattr(original, "__func__", None) is not nn.Linear.forward:
        raise _Unknown(f"{name} has replaced a forward that is not that of nn.Linear")
    if getattr(module, "_hf_quantized_needs_local_tp", False):
        raise _Unknown("it is quantized")
    mesh = _mesh_of(module)
    assert mesh is not None and style is not None
    layouts = LinearLayouts(mesh, style.input_layouts, style.output_layouts, bool(style.use_local_output))
    return _Style(name, layouts, lambda: vars(module).pop("forward"))


def _style_with_hooks(module: Any) -> _Style:
    read_key, reads, file, name, mesh = _hook_of_style(module, "forward_pre", "_prepare_input_fn")
    write_key, writes, *of_output = _hook_of_style(module, "forward", "_prepare_output_fn")
    if of_output != [file, name, mesh] or mesh.ndim != 1:
        raise _Unknown(f"its hooks are of different styles: {name} and {of_output[1]}")
    if "_bias" in dict(module.named_parameters(recurse=False)):
        raise _Unknown("transformers has moved its bias in a forward: convert before the first one")
    (x, *_), (y, is_y_local) = reads.args[0], writes.args
    layouts = LinearLayouts(mesh, x, y[0], bool(is_y_local), adds_bias_once=_STYLES_WITH_HOOKS[file])

    def take_off() -> None:
        del hooks_of(module, "forward_pre")[read_key], hooks_of(module, "forward")[write_key]

    return _Style(name, layouts, take_off)


def _hook_of_style(
    module: nn.Module, kind: str, function_name: str
) -> tuple[int, functools.partial[Any], str, str, DeviceMesh]:
    """The hook of a kind that calls this function of a known style: (its key, the call, file, name and mesh)."""
    others = []
    for key, hook in hooks_of(module, kind).items():
        remembered = remembered_by(hook)
        mesh = remembered.get("device_mesh")
        if not isinstance(mesh, DeviceMesh):
            continue  # of somebody else: units stay where there is such a hook, and the layer is balanced all the same
        call = remembered.get("input_fn", remembered.get("output_fn"))
        function = call.func if isinstance(call, functools.partial) else call
        file, name = str(getattr(function, "__module__", "")), str(getattr(function, "__qualname__", ""))
        style, _, called = name.partition(".")
        is_known = file in _STYLES_WITH_HOOKS and style in _KINDS and called == function_name
        if is_known and isinstance(call, functools.partial):
            return key, call, file, style, mesh
        others.append(f"{file}.{name}")
    what = "input" if kind == "forward_pre" else "output"
    raise _Unknown(f"how it was split is not known: {', '.join(others) or 'nothing'} prepares its {what}")
