"""A model and its optimizer for torch.distributed.checkpoint (DCP), however they are divided over the ranks.

Modules of this package import DCP, pipelines or strategies only where they are called: others would pay for them at
``import zeroresize``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_ranks, group_size
from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.integrations.hosts import host_of, process_group_of
from zeroresize.plan.layout import unit_pieces
from zeroresize.resharding.data_parallel import unwrap

if TYPE_CHECKING:
    from zeroresize.checkpoints.divided_tensor import TensorDivision
    from zeroresize.strategy.model import SwitchableModel


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
        ``optimizer.<parameter>.master_weight`` for what mixed precision steps, ``optimizer.<parameter>.has_state``,
        ``optimizer.param_groups`` and ``optimizer.format``, the number of this format; of a pipeline see
        :mod:`zeroresize.checkpoints.pipeline_state`. Only DCP can use it:
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
    if isinstance(model, nn.Module):
        return _state_of_module(unwrap(model), optimizer)
    from zeroresize.pipeline.pipeline import Pipeline
    from zeroresize.strategy.model import SwitchableModel

    if isinstance(model, SwitchableModel):
        return _state_of_switchable(model, optimizer)
    if isinstance(model, Pipeline):
        from zeroresize.checkpoints.pipeline_state import pipeline_state

        return pipeline_state(model, optimizer)
    raise ValueError(
        f"sharded_state_dict: a {type(model).__name__} is neither a module, a Pipeline nor a SwitchableModel"
    )


def _groups_of(model: Any) -> list[ProcessGroup]:
    """The groups over which a model is divided, as far as its layers tell."""
    if not isinstance(model, nn.Module):  # a Pipeline or a SwitchableModel
        return [model.process_group] if hasattr(model, "process_group") else []
    hosts = ((host_of(module), module) for module in unwrap(model).modules())
    groups = [process_group_of(host, module) for host, module in hosts if host is not None]
    return list({tuple(group_ranks(group)): group for group in groups}.values())


def _state_of_module(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    from zeroresize.checkpoints.divisions import divisions_of, own_tensors

    divisions = divisions_of(model)
    tensors: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        has_own = type(module).get_extra_state is not nn.Module.get_extra_state
        if has_own and module.get_extra_state() is not None:
            raise ValueError(
                f"sharded_state_dict: module {prefix} ({type(module).__name__}) has extra state, which cannot be saved "
                "with what is divided: save with `with balancer.at_home(): ...` instead"
            )
        tensors |= {f"{prefix}.{key}".lstrip("."): tensor for key, tensor in own_tensors(module).items()}
    return _state(tensors, dict(model.named_parameters()), divisions, optimizer)


def _state_of_switchable(model: SwitchableModel, optimizer: Any) -> dict[str, Any]:
    """Whole tensors, of which this rank gives what the optimizer's layout holds; some ranks may hold none."""
    from zeroresize.checkpoints.divided_tensor import TensorDivision

    if model.current != model.optimizer_strategy:
        raise RuntimeError(
            f"sharded_state_dict: strategy {model.current} is in force, and the weights are under the "
            "optimizer's strategy between two steps only: call it behind model.collect()"
        )
    specs = {spec.name: (number, spec) for number, spec in enumerate(model.tensors)}
    layout, parameters = model.layout_of(model.optimizer_strategy), dict(model.named_parameters())
    divisions: dict[int, TensorDivision] = {}
    for name, parameter in parameters.items():
        number, spec = specs[name]
        if (division := spec.division) is not None:
            units = np.array(layout.units_of(number, model.rank), dtype=np.int64)
            pieces = unit_pieces(units, division.num_units, (division.rows,) * division.num_parts)
            divisions[id(parameter)] = TensorDivision(division.dim, spec.shape[division.dim], partial(tuple, pieces))
    return _state(parameters, parameters, divisions, optimizer)


def _state(
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    divisions: Mapping[int, TensorDivision],
    optimizer: Any,
) -> dict[str, Any]:
    """What DCP gets of tensors by name; of those in ``divisions``, by ``id``, this rank holds a part."""
    from zeroresize.checkpoints.checksums import CHECKSUMS, Checksums
    from zeroresize.checkpoints.divided_tensor import ChecksumsEntry, DividedTensor
    from zeroresize.checkpoints.optimizer_state import OPTIMIZER, OptimizerState

    checksums = Checksums()
    state: dict[str, Any] = {
        name: DividedTensor(name, tensor, divisions.get(id(tensor)), checksums) for name, tensor in tensors.items()
    }
    if optimizer is not None:
        state[OPTIMIZER] = OptimizerState(optimizer, parameters, divisions, checksums)
    state[CHECKSUMS] = ChecksumsEntry(checksums)
    return state
