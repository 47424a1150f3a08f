"""What averages gradients over data-parallel ranks, and what of a model has no gradient of the whole batch."""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from zeroresize.comm.collectives import group_ranks, group_size
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.utils.torch_private import BatchNorm, fsdp_parameters_of, is_fsdp_module, ranks_of_fsdp


def gathers_in_forwards(model: nn.Module, process_group: ProcessGroup | None) -> bool:
    """Return whether all ranks need equally many forwards, as parameters are gathered in each.

    Raises:
        ValueError: where neither DistributedDataParallel nor FSDP averages gradients over the ranks of the group, or
            where it averages over others.
    """
    averaged = {}
    for name, module in model.named_modules():
        who = f"{type(module).__name__} {name}".strip()
        if is_fsdp_module(module):
            averaged[who] = sorted({*chain(*map(ranks_of_fsdp, fsdp_parameters_of(module)))}) or None, True
        elif isinstance(module, DistributedDataParallel):
            averaged[who] = sorted(group_ranks(module.process_group)), False
        elif isinstance(module, _fully_sharded_data_parallel()):
            averaged[who] = sorted(group_ranks(module.process_group)), True
    if process_group is None or group_size(process_group) == 1:
        return False
    ranks = sorted(group_ranks(process_group))
    if not averaged:
        raise ValueError(
            f"model={type(model).__name__} is not allowed: neither DistributedDataParallel nor fully_shard averages "
            "its gradients over the ranks; wrap it first, and give the module that the training loop calls"
        )
    for who, (others, _) in averaged.items():
        if others not in (ranks, None):
            raise ValueError(f"{who} averages gradients over ranks {others}, and process_group holds {ranks}")
    return any(gathers for _, gathers in averaged.values())


def has_tensor_parallel_ranks(model: nn.Module, process_group: ProcessGroup) -> bool:
    """Return whether ranks outside of the group share this one's samples, as each computes a part of the layers."""
    ranks = set(group_ranks(process_group))
    meshes = [parameter.device_mesh.mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    groups = [module.process_group for module in model.modules() if isinstance(module, BalancedLinear)]
    return any(set(mesh.flatten().tolist()) - ranks for mesh in meshes) or any(
        group_size(group) > 1 for group in groups
    )


class BatchNorms:
    """Knows a model's layers that normalise by the samples of a rank, which no weight of a loss makes up for."""

    def __init__(self, model: nn.Module) -> None:
        norms = {name: module for name, module in model.named_modules() if isinstance(module, BatchNorm)}
        self._alone = {name: each for name, each in norms.items() if not isinstance(each, nn.SyncBatchNorm)}
        self.of_all_ranks = [name for name in norms if name not in self._alone]

    def require_none_in_training(self) -> None:
        """Raise ValueError where one normalises by the batch."""
        training = [name for name, module in self._alone.items() if module.training or module.running_mean is None]
        if training:
            raise ValueError(
                f"batch norm ({', '.join(training[:3])}{', …' if training[3:] else ''}) normalises by the samples of a "
                "rank, so that a division of other sizes has another gradient: use "
                "nn.SyncBatchNorm.convert_sync_batchnorm, or keep these layers in eval()"
            )


def _fully_sharded_data_parallel() -> Any:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return () if fsdp is None else fsdp.FullyShardedDataParallel
