"""Whether a model can be balanced over a group while an optimizer trains it, checked before anything is attached.

DDP over the tensor-parallel group averages shards that belong to different columns; an optimizer of some layers leaves
the others as they are. Neither fails by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from zeroresize.comm.collectives import group_ranks, group_size, same_ranks
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import MIGRATING_MODES, PRIORITY_MODES
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.weight_checks import is_flat_parameters, why_no_whole_weight
from zeroresize.measure.step_timer import LayerTimer
from zeroresize.optim.optimizers import not_stepped
from zeroresize.resharding.segments.search_segments import first_of
from zeroresize.utils.torch_private import running_ddp

logger = logging.getLogger(__name__)

Layers = Mapping[str, BalancedLinear]

#: So many of what is wrong an error names.
MOST_NAMED = 4
HINT = "start_checks=False in the configuration turns this check off"


def check_weights(layers: Layers, config: BalanceConfig) -> None:
    """Check that the layers' weights are what ``config`` needs: something may have been put on them after converting.

    Raises:
        ValueError: naming the layer, what was found, and what is allowed.
    """
    needs_whole_weights = config.mode in (*PRIORITY_MODES, *MIGRATING_MODES) or config.pruned_update == "freeze"
    needs_own_parameter = (
        config.mode in ("mig", "semi")  # "exact" can do without lending
        or config.pruned_update == "freeze"
        or (config.mode in PRIORITY_MODES and config.priority == "path_length")
    )
    for name, layer in layers.items():
        gone = why_no_whole_weight(layer)
        if gone is not None:
            raise ValueError(
                f"layer {name} cannot be balanced: {gone}. Allowed are parameters [out, in]; of FSDP, fully_shard with "
                "mode='off' or 'zero-rd', and FullyShardedDataParallel with NO_SHARD and use_orig_params=True"
            )
        if layer.is_sharded_further(layer.weight) and needs_whole_weights:
            raise ValueError(
                f"layer {name} has a {type(layer.weight).__name__} as its weight, as fully_shard makes it: "
                f"between forwards there are only shards of it. mode={config.mode!r}, "
                f"pruned_update={config.pruned_update!r} needs it whole; allowed are mode='off' and 'zero-rd' with "
                "pruned_update='optimizer'"
            )
        if needs_own_parameter and not layer.may_lend:
            raise ValueError(
                f"layer {name} multiplies by a local_weight that is not its parameter: mode={config.mode!r}, "
                f"priority={config.priority!r}, pruned_update={config.pruned_update!r} need the parameter itself; "
                "allowed are the modes that do not migrate, other priorities than 'path_length', and "
                "pruned_update='optimizer'"
            )
        if is_flat_parameters(layer.weight) and config.mode in MIGRATING_MODES:
            raise ValueError(
                f"layer {name} is wrapped in FullyShardedDataParallel, which replaces its weight in every forward; "
                f"mode={config.mode!r} sends the weight before that; allowed are the modes that do not migrate"
            )


def check_layers(
    model: nn.Module, layers: Layers, optimizer: Any, process_group: ProcessGroup, config: BalanceConfig
) -> None:
    """Check that a model's layers can be balanced over this group while this optimizer trains them.

    Raises:
        ValueError: if they are another group's, they have another balancer, or the optimizer steps none of their
            weights; unless ``start_checks`` is off, also for what
            :func:`check_optimizer` and :func:`check_data_parallelism` find.
    """
    for name, layer in layers.items():
        if not same_ranks(layer.process_group, process_group):
            raise ValueError(f"layer {name} belongs to another process group: pass the one that convert was given")
    if group_size(process_group) == 1:
        return
    if any(layer.probes.holds(LayerTimer) for layer in layers.values()):
        raise ValueError("the model has another balancer: close() that one first")
    if not hasattr(optimizer, "param_groups") and not hasattr(optimizer, "optim"):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}, which has no parameters to step: pass the torch optimizer, or "
            "the host's wrapper of it"
        )
    weights = {name: layer.weight for name, layer in layers.items()}
    unknown = not_stepped(optimizer, weights)
    if unknown and len(unknown) == len(weights):
        raise ValueError(
            f"the optimizer does not step the weights of {first_of(unknown)}, nor any other layer's: make it from the "
            "parameters that the model has now"
        )
    check_optimizer(unknown, is_error=config.start_checks)
    if config.start_checks:
        check_data_parallelism(model, layers, process_group)


def check_optimizer(unknown: Sequence[str], *, is_error: bool) -> None:
    """Check that the optimizer steps every layer that is to learn.

    Args:
        unknown: names of layers whose weights it does not step although they want gradients.

    Raises:
        ValueError: if there are any; with ``is_error`` False they are warned of.
    """
    if not unknown:
        return
    message = (
        f"the optimizer does not step the weights of {first_of(unknown)}, which want gradients: was it made before "
        "they were?"
    )
    if is_error:
        raise ValueError(
            f"{message} Freeze them (requires_grad_(False)) where that is meant; where another optimizer steps them, "
            f"{HINT}"
        )
    logger.warning("%s", message)


def check_data_parallelism(model: nn.Module, layers: Layers, process_group: ProcessGroup) -> None:
    """Check that no DistributedDataParallel around ``layers`` averages over ranks that hold different shards.

    Raises:
        ValueError: naming the ranks that it averages over.
    """
    around = [*model.modules(), running_ddp()]
    for module in around:
        if not isinstance(module, DistributedDataParallel):
            continue
        shared = sorted(set(group_ranks(module.process_group)) & set(group_ranks(process_group)))
        ignored = module.parameters_to_ignore
        averaged = {
            id(parameter)
            for name, parameter in module.module.named_parameters()
            if parameter.requires_grad and name not in ignored
        }
        if len(shared) > 1 and any(id(layer.weight) in averaged for layer in layers.values()):
            raise ValueError(
                f"DistributedDataParallel averages gradients over ranks {shared} of the job, which hold different "
                "shards of the layers: give it the data-parallel group (process_group=...), whose ranks hold the same "
                f"shards, or leave it away where there is no data parallelism; {HINT}"
            )
