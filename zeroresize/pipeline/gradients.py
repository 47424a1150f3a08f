"""Clipping by the norm of all stages' gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroresize.comm.collectives import all_reduce
from zeroresize.pipeline.pipeline import Pipeline


@torch.no_grad()
def clip_grad_norm_(pipeline: Pipeline, max_norm: float) -> Tensor:
    """What ``torch.nn.utils.clip_grad_norm_`` does to the undivided model's gradients; collective.

    Not with tensor parallelism inside stages: each rank would count its own shards only, and scale by another factor
    than the others of its stage.

    Args:
        max_norm: of all stages' gradients together, as one vector.

    Returns:
        Their 2-norm before, on every rank.
    """
    gradients = [one.grad for one in pipeline.parameters() if one.grad is not None]
    squares = [torch.linalg.vector_norm(one, dtype=torch.promote_types(one.dtype, torch.float32)) for one in gradients]
    total = torch.zeros((), dtype=torch.float64, device=pipeline.device)
    for norm in squares:
        total += norm.double().square()
    all_reduce(total, pipeline.process_group)
    total.sqrt_()
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return total
