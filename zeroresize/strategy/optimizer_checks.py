"""Whether an optimizer may step, and steps, the parts of a model that its strategy leaves to this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from zeroresize.comm.meeting import Meet
from zeroresize.optim.independence import why_not_by_parameter, why_not_elementwise
from zeroresize.optim.optimizers import require_stepping
from zeroresize.plan.layout import TensorSpec
from zeroresize.plan.strategy import Strategy
from zeroresize.resharding.agreement import meet_prepared

if TYPE_CHECKING:
    from zeroresize.strategy.model import SwitchableModel


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


def require_ready_to_train(model: SwitchableModel, optimizer: Optimizer) -> None:
    """Check that the optimizer steps the model's parameters and no others, and that no gradients are left.

    Raises:
        ValueError: naming the parameters that are not as they must be.
    """
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    parameters = dict(model.named_parameters())
    missing = [name for name, one in parameters.items() if one.requires_grad and id(one) not in held]
    num_others = len(held - {id(one) for one in parameters.values()})
    if missing or num_others:
        raise ValueError(
            f"the optimizer does not step the parameters of its strategy {model.optimizer_strategy}: it lacks "
            f"{', '.join([f'{len(missing)} of them', *missing[:3]])}, and has {num_others} others; make it of "
            "model.parameters()"
        )
    left = [name for name, one in parameters.items() if one.grad is not None]
    if left:
        raise ValueError(
            f"{left} have gradients, to which the step's would be added: call optimizer.zero_grad() or "
            "model.abandon() before"
        )


def require_fitting_optimizer(model: SwitchableModel, optimizer: Optimizer, meet: Meet) -> None:
    """Check that the optimizer may step what its strategy leaves to the ranks; collective.

    Raises:
        ValueError: as :func:`require_divisible`; the other ranks may raise a
            RuntimeError, as one that the strategy leaves out has nothing to step.
    """
    prepared: tuple[float, float] | Exception = 0.0, 0.0
    try:
        require_divisible(optimizer, model.optimizer_strategy, dict(model.named_parameters()), model.tensors)
    except ValueError as error:  # the others must hear of it
        prepared = error
    meet_prepared(meet, prepared)
