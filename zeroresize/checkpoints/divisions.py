"""Each tensor of a model is divided in some way over the ranks of its tensor-parallel group.

Known are converted layers, in a segment or evenly divided, other layers of the same kinds, and what Colossal-AI and
Megatron-Core have divided, by what they note at their parameters. What is not known is an error: written as if every
rank held the same, all parts but one would be lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from zeroresize.checkpoints.divided_tensor import TensorDivision
from zeroresize.comm.collectives import group_rank, group_size
from zeroresize.integrations.lora import why_not_whole
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.layers.splitting import parts_of, place_of_rank
from zeroresize.plan.layout import Piece, unit_pieces
from zeroresize.resharding.fully_sharded import FullySharded, fully_sharded_in
from zeroresize.utils.torch_private import buffers_of, parameters_of, unsaved_buffers_of

#: By which Colossal-AI knows a tensor that it has divided, or made longer to divide by the ranks.
_MARKS = ("dist_layout", "shard_fn", "_padding_dim")


def divisions_of(model: nn.Module) -> dict[int, TensorDivision]:
    """Return the division of every parameter of which this rank holds a part, by its ``id``.

    All other parameters are the same on every rank.
    """
    _require_no_namesakes(model)
    if (why := why_not_whole(model)) is not None:
        raise ValueError(f"sharded_state_dict: {why}")
    sharded = fully_sharded_in(model, reshard=True)
    divisions: dict[int, TensorDivision] = {}
    unknown: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        known, doubtful = _of_module(module, sharded)
        divisions.update(known)
        unknown.update({f"{name}.{key}".lstrip("."): tensor for key, tensor in doubtful.items()})
    unknown = {name: tensor for name, tensor in unknown.items() if id(tensor) not in divisions}
    if unknown:
        name, tensor = next(iter(unknown.items()))
        raise ValueError(
            f"sharded_state_dict: {name} (shape {tuple(tensor.shape)} on this rank) belongs to a layer with a process "
            "group, and how it is divided over its ranks is not known, or whether it is. Divided tensors can be saved "
            "in layers that zeroresize.convert knows (see zeroresize.integrations.register_host) and in Colossal-AI's"
            f"{'' if len(unknown) == 1 else f'. The same holds for {len(unknown) - 1} others'}"
        )
    for key in [key for key in divisions if key in sharded and not sharded[key].is_whole]:
        if sharded[key].why_fixed is not None:
            raise ValueError(
                "sharded_state_dict: fully_shard has divided a part of a tensor further, "
                f"{sharded[key].why_fixed}, and what of it this rank holds is not known"
            )
        divisions[key] = replace(divisions[key], rows=sharded[key].rows)
    return divisions


def _require_no_namesakes(model: nn.Module) -> None:
    """Check that ranks do not call different tensors alike, as Megatron-Core does: a file would hold those of one."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    stages, experts = (
        max((getattr(config, f"{kind}_model_parallel_size", None) or 1 for config in configs), default=1)
        for kind in ("pipeline", "expert")
    )
    of_experts = [name for name, each in model.named_parameters() if getattr(each, "allreduce", True) is False]
    if stages > 1:
        alike = f"each of the {stages} stages of Megatron-Core's pipeline calls its layers layers.0 and so on"
    elif experts > 1 and of_experts:
        alike = f"{of_experts[0]} is of Megatron-Core's experts, which {experts} ranks divide and call alike"
    else:
        return
    raise ValueError(
        f"sharded_state_dict: {alike}, so that a file would hold one rank's alone. Allowed are "
        "pipeline_model_parallel_size=1 and expert_model_parallel_size=1; save others by Megatron-Core's own "
        "sharded_state_dict, with units at home"
    )


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that the module itself puts into a state dictionary, by name."""
    buffers = {name: one for name, one in buffers_of(module).items() if name not in unsaved_buffers_of(module)}
    return {name: one for name, one in (*parameters_of(module).items(), *buffers.items()) if one is not None}


def _of_module(
    module: nn.Module, sharded: Mapping[int, FullySharded]
) -> tuple[dict[int, TensorDivision], dict[str, Tensor]]:
    """What is known of a module's own tensors by ``id``, and by name those that may be parts in an unknown way."""
    if isinstance(module, BalancedLinear):
        if module.refused_at_home and module.is_sharded_further(module.weight):
            raise ValueError(
                f"sharded_state_dict: a {type(module).__name__} is packed (parts=), or split by units (unit_size=) "
                "that its ranks do not divide, and fully_shard has divided it further: its placements do not say what "
                "a rank holds. Split such a layer in another way beside fully_shard"
            )
        tensors = {
            name: tensor
            for name, tensor in own_tensors(module).items()
            if not _tells_its_division(tensor, module, sharded)
        }
        tensors |= {f"of units {name}": getattr(owner, name) for owner, name, *_ in module.extra}
        return _of_balanced(module, tensors)
    tensors = {name: one for name, one in own_tensors(module).items() if not isinstance(one, DTensor)}
    marked = [name for name, one in tensors.items() if any(hasattr(one, mark) for mark in _MARKS)]
    if marked:  # by Colossal-AI, which marks all that it divides
        divisions = {id(tensors[name]): _of_marked(tensors[name], module) for name in marked}
        known = {key: one for key, one in divisions.items() if isinstance(one, TensorDivision)}
        return known, {name: tensors[name] for name in marked if divisions[id(tensors[name])] is None}
    marked = [name for name, tensor in tensors.items() if getattr(tensor, "tensor_model_parallel", False)]
    if marked:  # by Megatron-Core, as it marks all that it divides
        held = {name: _of_megatron(tensors[name], module) for name in marked}
        of_group = {id(tensors[name]): division for name, division in held.items() if division is not None}
        return of_group, {name: tensors[name] for name, division in held.items() if division is None}
    group = vars(module).get("process_group")
    if isinstance(group, ProcessGroup) and group_size(group) > 1 and not isinstance(module, nn.SyncBatchNorm):
        return {}, tensors
    return {}, {}


def _tells_its_division(tensor: Tensor, layer: BalancedLinear, sharded: Mapping[int, FullySharded]) -> bool:
    """Whether it is a DTensor whose placements are right whatever moves, or where it is and nothing can move."""
    if not (isinstance(tensor, DTensor) and layer.has_dtensors):
        return False
    if layer.refused_at_home or layer.segment is None:
        return not layer.refused_at_home
    is_fixed = id(tensor) in sharded and sharded[id(tensor)].why_fixed is not None
    is_of_units = any(each.parameter is tensor for each in layer.segment.tensors)
    return not is_of_units or (is_fixed and layer.segment.owned.is_home)


def _of_balanced(layer: Any, tensors: dict[str, Tensor]) -> tuple[dict[int, TensorDivision], dict[str, Tensor]]:
    ranks, rank = group_size(layer.process_group), group_rank(layer.process_group)
    segment: OwnedSegment | None = layer.segment
    if segment is not None:
        held = set(map(id, tensors.values()))
        of_units = [one for one in segment.tensors if id(one.parameter) in held]
        divisions = {id(one.parameter): _of_units(one, segment, rank) for one in of_units}
        is_made = False
    else:
        dim, home = layer.divided_dim, layer.home
        if ranks > 1 and layer.local_weight.shape[dim] != layer.home_shape[dim]:
            raise ValueError(
                f"sharded_state_dict: a {type(layer).__name__} has a weight of shape {tuple(layer.local_weight.shape)} "
                f"on this rank, where its host made one of {tuple(layer.home_shape)}, and it is not known what it "
                "owns: is it a copy of a layer that was divided unevenly?"
            )
        parts, divisions = None if layer.moves_only else parts_of(layer), {}
        for key, at in layer.unit_dims.items():
            if key in tensors:
                sizes = parts or layer.parts_of_tensor(key)
                divisions[id(tensors[key])] = _by_home(at, sizes, home, rank, layer.begins)
        for owner, name, at, size in layer.extra:
            divisions[id(getattr(owner, name))] = _by_home(at, [size], home, rank, layer.begins)
        is_made = "weight" not in tensors and not layer.has_dtensors  # of other tensors, in every forward
    doubtful = {name: tensor for name, tensor in tensors.items() if id(tensor) not in divisions}
    if layer.moves_only:  # whose adapter knows of all
        return divisions, {}
    if is_made and ranks > 1:
        doubtful.update(layer.named_parameters())
    if not layer.is_column_parallel:  # every rank has the whole bias
        doubtful.pop("bias", None)
    return divisions, doubtful if ranks > 1 else {}


def _of_units(where: UnitTensor, segment: OwnedSegment, rank: int) -> TensorDivision:
    num_units, rows = len(segment.owned.owners) // where.block, where.rows

    def pieces() -> list[Piece]:
        is_shared = getattr(where.owner, "shared_rows", None) is not None
        return unit_pieces(where.held(segment.owned, rank), num_units, rows, each=is_shared)

    return TensorDivision(where.dim, num_units * sum(rows), pieces)


def _by_home(
    dim: int, parts: Sequence[int], home: Sequence[int], rank: int, begins: Sequence[int] = ()
) -> TensorDivision:
    """Of each part a rank has ``home[rank]`` units, from ``begins[rank]`` on where several ranks have some."""
    begin, num_units = place_of_rank(home, rank, begins)
    units = np.arange(begin, begin + home[rank])
    pieces = unit_pieces(units, num_units, [size // num_units for size in parts], each=bool(begins))
    return TensorDivision(dim, sum(parts), lambda: pieces)


def _of_megatron(tensor: Any, module: Any) -> TensorDivision | None:
    """How Megatron-Core has divided a tensor; None where its module tells no group."""
    group: ProcessGroup | None = getattr(module, "tp_group", None)
    if group is None:
        return None
    dim, num_parts, ranks = tensor.partition_dim, tensor.partition_stride, group_size(group)
    size = tensor.shape[dim] * ranks // num_parts
    return _by_home(dim, (size,) * num_parts, (1,) * ranks, group_rank(group))


def _of_marked(tensor: Any, module: Any) -> TensorDivision | bool | None:
    """How Colossal-AI has divided a tensor; False for not at all, None where that is not known."""
    if not hasattr(tensor, "shard_fn"):
        return _of_layout(tensor)
    group, blocks = getattr(module, "process_group", None), getattr(module, "split_sizes", None)
    sizes = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if blocks is None or not isinstance(group, ProcessGroup) or None in sizes:
        return None
    ranks, whole = group_size(group), sum(blocks)
    wholes = set(itertools.permutations(sizes)) if tensor.dim() == 2 else {sizes[:1]}
    dims = {
        dim
        for shape in wholes
        for dim in range(tensor.dim())
        if shape[dim] == whole == tensor.shape[dim] * ranks
        and all(size == own for other, (size, own) in enumerate(zip(shape, tensor.shape, strict=True)) if other != dim)
    }
    return _by_home(dims.pop(), blocks, (1,) * ranks, group_rank(group)) if len(dims) == 1 else None


def _of_layout(tensor: Any) -> TensorDivision | bool | None:
    layout: Any = getattr(tensor, "dist_layout", None)
    whole_shape = tuple(tensor.shape if layout is None else layout.global_shape)
    dims = [dim for dim, size in enumerate(whole_shape) if size != tensor.shape[dim]]
    padded_dim: int | None = getattr(tensor, "_padding_dim", None)
    if not dims and padded_dim is None:
        return False
    dim = dims[0] if dims else int(padded_dim or 0)
    ranks, rank = 1, 0
    if dims:
        axes = layout.sharding_spec.dim_partition_dict.get(dim, ())
        if len(dims) != 1 or len(axes) != 1 or padded_dim not in (None, dim):
            return None
        group = layout.device_mesh.get_process_group(axis=axes[0])
        ranks, rank = group_size(group), group_rank(group)
    if tensor.shape[dim] * ranks != whole_shape[dim]:
        return None
    if padded_dim is None:
        return _by_home(dim, [whole_shape[dim]], (1,) * ranks, rank)
    # A vocabulary that was made longer to divide by the ranks: files hold the words that there are.
    num_words, num_own = int(tensor._origin_length), tensor.shape[dim]
    length = max(0, min(num_own, num_words - rank * num_own))
    pieces = [Piece(rank * num_own, 0, length)] if length else []
    return TensorDivision(dim, num_words, lambda: pieces, num_own - length)
