"""Clipping by the norm of the undivided model's gradients, as they lie in the optimizer's strategy."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroresize.optim.gradient_clipping import norm_of_replicated, scale_gradients
from zeroresize.strategy.model import SwitchableModel


@torch.no_grad()
def grad_norm(model: SwitchableModel) -> Tensor:
    """Return the 2-norm of all gradients as one vector, on every rank, in float64; collective, behind ``collect()``.

    Each element counts once, however many ranks hold it.
    """
    dp, tp = model.optimizer_strategy.dp, model.optimizer_strategy.tp
    num_holders = {spec.name: dp if spec.division is not None else dp * tp for spec in model.tensors}
    parameters = ((parameter, num_holders[name]) for name, parameter in model.named_parameters())
    return norm_of_replicated(parameters, model.process_group, model.device)


@torch.no_grad()
def clip_grad_norm_(model: SwitchableModel, max_norm: float) -> Tensor:
    """Do to the undivided model's gradients what ``torch.nn.utils.clip_grad_norm_`` does; as :func:`grad_norm`.

    Returns:
        The norm before.
    """
    norm = grad_norm(model)
    scale_gradients(list(model.parameters()), max_norm, norm)
    return norm
