"""Clipping by the norm of the undivided model's gradients, as they lie in the home strategy."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroresize.comm.collectives import all_reduce
from zeroresize.optim.gradient_clipping import scale_gradients
from zeroresize.strategy.model import SwitchableModel


@torch.no_grad()
def grad_norm(model: SwitchableModel) -> Tensor:
    """The 2-norm of all gradients as one vector, on every rank, in float64; collective, after ``model.collect()``.

    Each element counts once, however many ranks hold it.
    """
    own = model.home
    is_divided = {one.name: one.division is not None for one in model.tensors}
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            norm = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
            total += norm.double().square() / (own.dp if is_divided[name] else own.dp * own.tp)
    all_reduce(total, model.process_group)
    return total.sqrt_()


@torch.no_grad()
def clip_grad_norm_(model: SwitchableModel, max_norm: float) -> Tensor:
    """What ``torch.nn.utils.clip_grad_norm_`` does to the undivided model's gradients; as :func:`grad_norm`.

    Returns:
        The norm before.
    """
    norm = grad_norm(model)
    scale_gradients(list(model.parameters()), max_norm, norm)
    return norm
