"""How a model is divided: its process group, which parameters are shards, which layers are column- or row-parallel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.checks.finding import PARAMETERS, ParallelFinding, finding
from zeroresize.checks.replicated import distance_of_sums, replicated_parameters, sums_of
from zeroresize.comm.collectives import group_size, require_group
from zeroresize.integrations.hosts import host_of, process_group_of
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.weight_checks import is_marked_as_shard
from zeroresize.resharding.ranks import Ranks
from zeroresize.utils.torch_private import is_dividing, is_dtensor


@dataclass(frozen=True)
class Part:
    """What a rank holds of a parameter; ``is_constant``: all its elements are equal on some rank, as in new biases."""

    name: str
    tensor: Tensor
    is_shard: bool
    is_constant: bool

    @property
    def local(self) -> Tensor:
        return local_of(self.tensor).detach()


def group_of_model(model: nn.Module) -> ProcessGroup:
    """Return the tensor-parallel group that a model's layers or parameters tell of, else that of all ranks."""
    for module in model.modules():
        host = host_of(module)
        if host is not None:
            return process_group_of(host, module)
    for parameter in model.parameters():
        if is_dtensor(parameter):
            mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
            return require_group(mesh["tp"] if mesh.ndim > 1 else mesh)
    held = [value for one in model.modules() for value in vars(one).values() if isinstance(value, ProcessGroup)]
    return next((group for group in held if group_size(group) > 1), require_group(dist.group.WORLD))


def parts_of(model: nn.Module, ranks: Ranks) -> tuple[list[Part], list[ParallelFinding]]:
    """Return the parts of all parameters, and which replicated ones differ; these are then the first rank's.

    Where neither a mark nor its layer tells what a parameter is, it is a shard where the ranks hold different values.
    """
    surely = {name for name, _ in replicated_parameters(model, ranks.process_group)}
    owners = {
        f"{prefix}.{name}" if prefix else name: module
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
    parameters = {name: one for name, one in model.named_parameters() if not one.is_meta and one.is_floating_point()}
    of_ranks = ranks.share({name: _description(one) for name, one in parameters.items()})
    parts, findings = [], []
    for name in [name for name in parameters if all(name in of_rank for of_rank in of_ranks)]:
        parameter, rows = parameters[name], [of_rank[name] for of_rank in of_ranks]
        known = _is_shard(parameter, owners[name], name)
        tolerance = math.sqrt(torch.finfo(parameter.dtype).eps)
        (shape, _, *sums), *_ = rows
        distance = max(distance_of_sums(row[2:], sums) if row[0] == shape else math.inf for row in rows)
        is_shard = distance > tolerance and name not in surely if known is None else known
        parts.append(Part(name, parameter, is_shard, any(row[1] for row in rows)))
        if not is_shard and distance > 0.0 and math.isfinite(distance):
            ranks.give_first(parts[-1].local)
        if not is_shard and distance > tolerance:
            detail = f"its copies differ by {distance:.1e} of their norm; further checks are of the first rank's"
            findings.append(finding(PARAMETERS, detail, parameter=name))
    return parts, findings


def _description(parameter: Tensor) -> list[Any]:
    local = local_of(parameter).detach()
    is_constant = local.numel() == 0 or bool((local == local.flatten()[0]).all())
    return [list(local.shape), is_constant, *sums_of(local).tolist()]


def _is_shard(parameter: Tensor, owner: nn.Module, name: str) -> bool | None:
    """None where neither the parameter nor its layer tells."""
    if is_dtensor(parameter):
        return any(map(is_dividing, parameter.placements))  # type: ignore[attr-defined]
    if is_marked_as_shard(parameter) or hasattr(parameter, "shard_fn"):  # the second of Colossal-AI's fused layers
        return True
    if isinstance(owner, BalancedLinear):
        return name.rpartition(".")[2] in owner.unit_dims
    kind = kind_of_layer(owner)
    return True if kind == "column" else name.rpartition(".")[2] != "bias" if kind == "row" else None


def kind_of_layer(module: nn.Module) -> str:
    """Return "column" or "row" for a layer whose weight is divided, "embedding" for a divided vocabulary, else ""."""
    weight: Any = getattr(module, "weight", None)
    if isinstance(module, BalancedLinear):  # of which some have the host's products
        return "" if module.moves_only else "column" if module.is_column_parallel else "row"
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return ""
    is_embedding = hasattr(module, "num_embeddings")
    if is_dtensor(weight):
        placement = weight.placements[-1]  # type: ignore[attr-defined]
        if not is_dividing(placement):
            return ""
        kinds = {0: "embedding", 1: ""} if is_embedding else {0: "column", 1: "row"}
        return kinds[placement.dim % 2]
    name = type(module).__name__
    if is_embedding:
        return "embedding" if "VocabParallel" in name else ""
    if "Row" in name or "Allreduce" in name or "AllReduce" in name:
        return "row"
    return "column" if "Col" in name or name == "LinearLayer" or "VocabParallelLMHead" in name else ""
