"""Gradients of a pipeline are clipped by the norm over all stages."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroresize.optim.gradient_clipping import grad_norm, norm_over, scale_gradients
from zeroresize.pipeline.pipeline import Pipeline


@torch.no_grad()
def clip_grad_norm_(pipeline: Pipeline, max_norm: float) -> Tensor:
    """Scale the gradients of all stages so that their 2-norm is at most ``max_norm``; collective.

    The result is that of ``torch.nn.utils.clip_grad_norm_`` on the undivided model.

    With tensor parallelism inside stages the norm is taken over the stages' groups, too: see
    :func:`zeroresize.clip_grad_norm_`.

    Args:
        max_norm: of all stages' gradients together, as one vector.

    Returns:
        The 2-norm before scaling, on every rank.

    Raises:
        ValueError: for layers of several tensor-parallel groups.
    """
    parameters = list(pipeline.parameters())  # of all stages' layers, so all ranks find the same groups
    total = norm_over(grad_norm(parameters).to(pipeline.device).square(), pipeline.process_group)
    scale_gradients(parameters, max_norm, total)
    return total
