"""A switchable model for torch.distributed.checkpoint (DCP): what one strategy of the optimizer wrote, any other reads.

A file has the names of the undivided model (``layers.3.attention.query.weight``), and the optimizer's beside them, as
:class:`~zeroresize.resharding.checkpoints.optimizer_state.OptimizerState` names them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from zeroresize.plan.layout import TensorSpec
from zeroresize.resharding.checkpoints.divided_tensor import DividedTensor, TensorDivision, unit_pieces
from zeroresize.resharding.checkpoints.optimizer_state import OptimizerState
from zeroresize.resharding.checkpoints.sharded_state import OPTIMIZER, sharded_state_of
from zeroresize.strategy.model import SwitchableModel


@sharded_state_of.register
def _(model: SwitchableModel, optimizer: Any) -> dict[str, Any]:
    """Return whole tensors, of which this rank gives what the optimizer's layout holds; see the module.

    A rank the optimizer's strategy leaves out takes part without weights.
    """
    if model.current != model.optimizer_strategy:
        raise RuntimeError(
            f"sharded_state_dict: strategy {model.current} is in force, and the weights are under the "
            "optimizer's strategy between two steps only: call it behind model.collect()"
        )
    specs = {one.name: (number, one) for number, one in enumerate(model.tensors)}
    layout = model.layout_of(model.optimizer_strategy)
    parameters = dict(model.named_parameters())
    divisions: dict[int, TensorDivision] = {}
    state: dict[str, Any] = {}
    for name, parameter in parameters.items():
        number, spec = specs[name]
        division = _division(spec, layout.units_of(number, model.rank))
        if division is not None:
            divisions[id(parameter)] = division
        state[name] = _part(name, parameter, division)
    if optimizer is not None:
        state[OPTIMIZER] = OptimizerState(optimizer, parameters, divisions)
    return state


def _division(spec: TensorSpec, units: range) -> TensorDivision | None:
    """How a rank that holds these units has the tensor; None where it has the whole."""
    division = spec.division
    if division is None:
        return None
    pieces = unit_pieces(np.array(units, dtype=np.int64), division.num_units, (division.rows,) * division.num_parts)
    return TensorDivision(division.dim, spec.shape[division.dim], lambda: pieces)


def _part(name: str, parameter: Tensor, division: TensorDivision | None) -> Tensor:
    return parameter.data if division is None else DividedTensor(name, parameter, division)
