"""What a DataBalancer refuses before it divides anything: numbers that do not fit, and models."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from zeroresize.comm.collectives import group_ranks, group_size
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.weight_checks import is_wrapped_by_fsdp
from zeroresize.utils.torch_private import BatchNorm, fsdp_parameters_of, is_fsdp_module, ranks_of_fsdp


def require_numbers(
    limits: Sequence[float],
    global_batch: int,
    counts: Sequence[int] | None,
    num_micro_batches: int,
    micro_batch_size: int | None,
) -> None:
    """Check what no single value tells; ``limits`` are the most samples of each rank."""
    num_ranks = len(limits)
    if counts is not None and (len(counts) != num_ranks or sum(counts) != global_batch):
        raise ValueError(
            f"counts={list(counts)} are not allowed: {num_ranks} numbers are needed, one a rank, that are "
            f"global_batch={global_batch} together"
        )
    if any(0 < count < num_micro_batches for count in counts or ()):
        raise ValueError(f"counts={list(counts or ())} are not allowed: {num_micro_batches} samples or none are needed")
    if micro_batch_size is not None and num_micro_batches > 1:
        raise ValueError(
            f"micro_batch_size={micro_batch_size} is not allowed beside num_micro_batches={num_micro_batches}"
        )
    if num_micro_batches * num_ranks > global_batch:
        raise ValueError(
            f"num_micro_batches={num_micro_batches} is not allowed: {num_ranks} ranks with a sample in each need a "
            f"global_batch of {num_micro_batches * num_ranks}, which is {global_batch}"
        )
    if sum(limits) < global_batch:
        raise ValueError(f"max_samples of all ranks, {list(limits)}, are fewer than global_batch={global_batch}")
    if min(limits) < num_micro_batches or any(map(operator.gt, counts or (), limits)):
        raise ValueError(
            f"max_samples of all ranks, {list(limits)}, are not enough for num_micro_batches={num_micro_batches} "
            f"and counts={counts}"
        )


def require_averaged(
    model: nn.Module, process_group: ProcessGroup, micro_batch_size: int | None, counts: Sequence[int] | None
) -> None:
    """Check that gradients are averaged over the ranks of the group, that nobody else shares their samples, and that
    each may make as many forwards as its samples need.
    """
    ranks, averaged, gathered = sorted(group_ranks(process_group)), False, False
    wrappers: dict[str, Any] = dict(model.named_modules())
    for name, wrapper in wrappers.items():
        is_fsdp = is_wrapped_by_fsdp(wrapper)
        if not is_fsdp and not isinstance(wrapper, DistributedDataParallel):
            continue
        if is_fsdp_module(wrapper):
            others = sorted({*chain(*map(ranks_of_fsdp, fsdp_parameters_of(wrapper)))}) or ranks
        else:
            others = sorted(group_ranks(wrapper.process_group))
        if others != ranks:
            who = f"{type(wrapper).__name__} {name}".strip()
            raise ValueError(f"{who} averages gradients over ranks {others}, and process_group holds {ranks}")
        averaged, gathered = True, gathered or is_fsdp
    if not averaged:
        raise ValueError(
            f"model={type(model).__name__} is not allowed: neither DistributedDataParallel nor fully_shard averages "
            "its gradients over the ranks; wrap it first, and give the module that the training loop calls"
        )
    if micro_batch_size is not None and gathered:
        raise ValueError(
            f"micro_batch_size={micro_batch_size} is not allowed with FSDP, which gathers parameters in every forward, "
            "so that all ranks need equally many: num_micro_batches says how many"
        )
    meshes = [each.device_mesh.mesh.flatten().tolist() for each in model.parameters() if isinstance(each, DTensor)]
    groups = [each.process_group for each in model.modules() if isinstance(each, BalancedLinear)]
    if counts is None and (not {*chain(*meshes)} <= {*ranks} or any(group_size(group) > 1 for group in groups)):
        raise ValueError(
            "the ranks that share a rank's samples, as each computes a part of the layers, would not divide batches "
            "alike: counts say how they are divided"
        )


def batch_norms_of(model: nn.Module) -> dict[str, BatchNorm]:
    """Return the layers that normalise by a batch, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BatchNorm)}


def require_samples(norms: Mapping[str, BatchNorm]) -> None:
    """Check that no batch norm is over all ranks, of which some may lack samples."""
    if shared := [name for name, norm in norms.items() if isinstance(norm, nn.SyncBatchNorm)]:
        raise ValueError(
            f"batch norm over all ranks ({shared[0]}) would count what a rank without samples computes: no count may "
            "be 0, and where the last global batch is smaller drop_last=True is needed"
        )


def require_no_batch_norm(norms: Mapping[str, BatchNorm]) -> None:
    """Check that none normalises by the samples of a rank, which no weight of a loss makes up for."""
    alone = {name: norm for name, norm in norms.items() if not isinstance(norm, nn.SyncBatchNorm)}
    if training := [name for name, norm in alone.items() if norm.training or norm.running_mean is None]:
        raise ValueError(
            f"batch norm ({', '.join(training[:3])}{', …' if training[3:] else ''}) normalises by the samples of a "
            "rank, so that a division of other sizes has another gradient: use "
            "nn.SyncBatchNorm.convert_sync_batchnorm, or keep these layers in eval()"
        )
