"""Whether an optimizer may step the parts of a model that its home leaves to this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from zeroresize.optim.independence import why_not_by_parameter, why_not_elementwise
from zeroresize.plan.layout import TensorSpec
from zeroresize.plan.strategy import Strategy


def require_divisible(
    optimizer: object | None, home: Strategy, parameters: Mapping[str, Tensor], tensors: Sequence[TensorSpec]
) -> None:
    """Check that steps on the parts of a home are those on the undivided model.

    Args:
        parameters: that this rank steps now, by name.
        tensors: of the undivided model.

    Raises:
        ValueError: if the home divides tensors and the optimizer does not treat them element by element, or it has
            tensors on several ranks and the optimizer does not treat them one by one.
    """
    if optimizer is None:
        return
    divided = {one.name for one in tensors if one.division is not None}
    reason = None
    if home.tp > 1:
        reason = why_not_elementwise(optimizer, [one for name, one in parameters.items() if name in divided])
    if reason is None and home.pp > 1:
        reason = why_not_by_parameter(optimizer, parameters.values())
    if reason is not None:
        raise ValueError(f"the home {home} divides what the optimizer steps, but {reason}. Or choose another home=")
