"""A model and its optimizer for torch.distributed.checkpoint (DCP), however they are divided over the ranks."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_ranks, group_size
from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.integrations.hosts import host_of, process_group_of
from zeroresize.resharding.data_parallel import unwrap

OPTIMIZER = "optimizer"


def sharded_state_dict(model: Any, optimizer: Any = None) -> dict[str, Any]:
    """Return what ``torch.distributed.checkpoint`` (DCP) saves and loads of a model, wherever its parts are.

    Of a model with parallel layers::

        dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=folder)

        dcp.load(zr.sharded_state_dict(model, optimizer), storage_reader=zr.CheckpointReader(folder))  # in place

    Of a :class:`~zeroresize.pipeline.Pipeline`, whose group must be given, and which may have been built with other
    boundaries on another number of stages; what its balancer has learned goes beside it::

        state = {**zr.sharded_state_dict(pipeline, optimizer), "balancer": balancer}
        dcp.save(state, checkpoint_id=folder, process_group=pipeline.process_group)

        state = {**zr.sharded_state_dict(pipeline, optimizer), "balancer": balancer}
        dcp.load(state, storage_reader=zr.CheckpointReader(folder), process_group=pipeline.process_group)

    Of a :class:`~zeroresize.strategy.SwitchableModel`, which may have other strategies and another home::

        dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=folder)

        dcp.load(zr.sharded_state_dict(model, optimizer), storage_reader=zr.CheckpointReader(folder))
        trainer.num_steps = num_steps

    A file holds whole tensors, by the names of the model that is not divided. So what was saved under any division can
    be loaded under any other one, on another number of ranks, and into the model that is not divided; each rank reads
    and writes what it holds, and nothing is gathered. Both calls are collective over all ranks, which may not move
    units or layers until they return. Gradients are not saved.

    Other things are saved beside it: ``{**zr.sharded_state_dict(model, optimizer), "balancer": balancer}``.

    Args:
        model: converted, or not yet; or what Colossal-AI's Booster or DistributedDataParallel made of it, of which
            replicas hold the same; or a Pipeline; or a SwitchableModel, between two steps.
        optimizer: the only one that steps the model's parameters, or a host's wrapper of it. It may be new: state is
            made where it has none and the file has some, and taken away where the file has none. In mixed precision
            pass it always: otherwise its master weights stay as they are, and the next step would bring them back.

    Returns:
        For every parameter and persistent buffer, by its name in ``model.state_dict()``, a tensor; of those that are
        divided the parameter's own shape is that of this rank's part, and that in the file the whole layer's:
        [out, in] of a linear layer's weight, blocks such as q, k and v one after another. Under ``"optimizer"`` a
        Stateful whose names in the file are ``optimizer.<parameter>.<key>`` for state (``exp_avg``, ``step``, …),
        ``optimizer.<parameter>.master_weight`` for what mixed precision steps, ``optimizer.<parameter>.has_state``, and
        ``optimizer.param_groups``; of a pipeline see :mod:`zeroresize.pipeline.pipeline_state`. Only DCP can use it:
        ``torch.save`` of it is an error.

    Raises:
        ValueError: for a tensor that may be divided in a way that is not known, as in a parallel layer of another
            library; for an optimizer whose tensors are not the model's, such as ZeRO's shards, or whose state of a
            divided tensor has another shape, such as Adafactor's; for modules with extra state, except in a pipeline.
        RuntimeError: for a rank that its pipeline has released; for a SwitchableModel within a step; for ranks that
            share the model's layers and do not come, naming them.
    """
    for process_group in _groups_of(model):
        if group_size(process_group) > 1:  # torch would name a socket, once the first collective of DCP times out
            purpose = "call sharded_state_dict, which all of them must, not rank 0 alone,"
            Rendezvous(process_group, purpose).exchange("called")
    return sharded_state_of(model, optimizer)


def _groups_of(model: Any) -> list[ProcessGroup]:
    """The groups over which a model is divided, as far as its layers tell."""
    if not isinstance(model, nn.Module):  # a Pipeline or a SwitchableModel
        return [model.process_group] if hasattr(model, "process_group") else []
    hosts = ((host_of(module), module) for module in unwrap(model).modules())
    groups = [process_group_of(host, module) for host, module in hosts if host is not None]
    return list({tuple(group_ranks(group)): group for group in groups}.values())


@singledispatch
def sharded_state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return what :func:`sharded_state_dict` does; packages above this one register their kinds of models here."""
    # Only now: others would pay for it at `import zeroresize`.
    from zeroresize.resharding.checkpoints.divided_tensor import DividedTensor
    from zeroresize.resharding.checkpoints.divisions import divisions_of, own_tensors
    from zeroresize.resharding.checkpoints.optimizer_state import OptimizerState

    model = unwrap(model)
    divisions = divisions_of(model)
    state: dict[str, Any] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"sharded_state_dict: module {prefix} ({type(module).__name__}) has extra state, which cannot be saved "
                "with what is divided: save with `with balancer.at_home(): ...` instead"
            )
        for key, tensor in own_tensors(module).items():
            name = f"{prefix}.{key}".lstrip(".")
            division = divisions.get(id(tensor))
            state[name] = tensor.data if division is None else DividedTensor(name, tensor, division)
    if optimizer is not None:
        state[OPTIMIZER] = OptimizerState(optimizer, dict(model.named_parameters()), divisions)
    return state
