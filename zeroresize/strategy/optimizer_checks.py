"""Whether an optimizer may step the parts of a model that its strategy leaves to this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from zeroresize.optim.independence import why_not_by_parameter, why_not_elementwise
from zeroresize.optim.optimizers import require_stepping
from zeroresize.plan.layout import TensorSpec
from zeroresize.plan.strategy import Strategy


def require_divisible(
    optimizer: object | None,
    optimizer_strategy: Strategy,
    parameters: Mapping[str, Tensor],
    tensors: Sequence[TensorSpec],
) -> None:
    """Check that steps on the parts under the optimizer's strategy are those on the undivided model.

    Args:
        parameters: that this rank steps now, by name.
        tensors: of the undivided model.

    Raises:
        ValueError: if the optimizer does not step all parameters that want gradients; if its strategy divides tensors
            and it does not treat them element by element, or it has tensors on several ranks and the optimizer does not
            treat them one by one.
    """
    require_stepping(optimizer, parameters)
    if optimizer is None:
        return
    divided = {one.name for one in tensors if one.division is not None}
    reason = None
    if optimizer_strategy.tp > 1:
        reason = why_not_elementwise(optimizer, [one for name, one in parameters.items() if name in divided])
    if reason is None and optimizer_strategy.pp > 1:
        reason = why_not_by_parameter(optimizer, parameters.values())
    if reason is not None:
        raise ValueError(
            f"the optimizer's strategy {optimizer_strategy} divides what it steps, but {reason}. Or choose "
            "another optimizer_strategy="
        )
