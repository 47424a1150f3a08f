"""Clipping by the norm of the undivided model's gradients; ``R`` ranks of the tensor-parallel group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import all_gather, all_reduce, group_size, message_device
from zeroresize.layers.weight_checks import sharding_of
from zeroresize.utils.torch_private import norms_of, scale_all


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the undivided model's gradients in place, as ``torch.nn.utils.clip_grad_norm_`` does; collective.

    That function itself would take each rank's own shards only, and scale what all ranks hold alike by other factors on
    other ranks. Collective over the tensor-parallel group, also on a rank without gradients, and whoever owns which
    units. Of parameters that all ranks hold, rank 0's gradients count, once.

    Shards are the parameters of this package's layers and of those that ``convert`` took, but for the row-parallel
    bias. A shard of a layer of your own is one where it has ``tensor_model_parallel=True``, as Megatron marks it. In
    mixed precision unscale gradients before. A :class:`~zeroresize.pipeline.Pipeline` has a function of its own.

    Args:
        parameters: of the model, the same on all ranks; those without a gradient have none.
        max_norm: of all gradients together, as one vector.
        norm_type: p > 0 of the p-norm; ``inf`` for the largest element.
        error_if_nonfinite: whether to raise if the norm is nan or infinite; on all ranks then.
        foreach: whether many tensors are computed with at once; None for where torch can.

    Returns:
        The norm before, of no dimension, on the first parameter's device; bitwise the same on every rank.

    Raises:
        ValueError: for another ``norm_type``, a negative ``max_norm``, layers of several process groups, and marked
            shards without a layer that tells their group.
        RuntimeError: if the norm is not finite and ``error_if_nonfinite``; nothing is scaled. If a rank does not come.
    """
    wanted = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not float(max_norm) >= 0.0:
        raise ValueError(f"max_norm={max_norm!r} is not allowed: a number of at least 0 is needed")
    norm = grad_norm(wanted, norm_type, foreach)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped. To "
            "scale them by it all the same, set error_if_nonfinite=False"
        )
    scale_gradients(wanted, float(max_norm), norm, foreach)
    return norm.to(torch.float64 if any(one.dtype is torch.float64 for one in wanted) else torch.float32)


def grad_norm(parameters: Sequence[Tensor], norm_type: float = 2.0, foreach: bool | None = None) -> Tensor:
    """Compute the p-norm of the undivided model's gradients, in float64; collective, as :func:`clip_grad_norm_`."""
    p = float(norm_type)
    if not p > 0.0:
        raise ValueError(f"norm_type={norm_type!r} is not allowed: a number above 0 is needed, or inf")
    group, are_shards = sharding_of(parameters)
    device = parameters[0].device if parameters else torch.device("cpu")
    with torch.no_grad():
        norms = [
            _norm([one for one, is_shard in zip(parameters, are_shards, strict=True) if is_shard is wanted], p, foreach)
            for wanted in (False, True)
        ]
        both = torch.stack([norm.to(device) for norm in norms])  # of what all ranks hold, and of shards
        if group is None or group_size(group) == 1:
            return torch.linalg.vector_norm(both, p)
        # Gathered, not summed: ranks then add in one order, whatever the algorithm of a backend.
        rows = [row.to(device) for row in all_gather(both.to(message_device(group, device)), group)]
        return torch.linalg.vector_norm(torch.stack([rows[0][0], *(row[1] for row in rows)]), p)


def norm_of_replicated(
    parameters: Iterable[tuple[Tensor, int]], process_group: ProcessGroup, device: torch.device
) -> Tensor:
    """Compute the 2-norm of all gradients of a group's ranks as one vector, in float64, on ``device``; collective.

    Each parameter comes with how many ranks of the group hold the same gradient: it counts once.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter, num_holders in parameters:
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad, dtype=_wide(parameter.grad.dtype))
            total += norm.double().square() / num_holders
    return norm_over(total, process_group)


def norm_over(squares: Tensor, process_group: ProcessGroup) -> Tensor:
    """Compute the 2-norm of what ranks hold together, in place of each rank's sum of squares; collective."""
    all_reduce(squares, process_group)
    return squares.sqrt_()


def scale_gradients(parameters: Sequence[Tensor], max_norm: float, norm: Tensor, foreach: bool | None = None) -> None:
    """Scale all gradients so that ``norm``, theirs at present, gets ``max_norm`` at most."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for (device, dtype), gradients in _by_kind(parameters).items():
        local_factor = factor.to(device, torch.promote_types(dtype, torch.float32))
        if foreach is False:
            for gradient in gradients:
                gradient.mul_(local_factor)
        else:
            scale_all(gradients, local_factor)


def _norm(parameters: Sequence[Tensor], p: float, foreach: bool | None) -> Tensor:
    """Compute the p-norm of the gradients that this process holds; of DTensors, of all ranks of their mesh."""
    norms: list[Tensor] = []
    whole: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if hasattr(parameter.grad, "full_tensor"):
            norms.append(torch.linalg.vector_norm(parameter.grad, p, dtype=_wide(parameter.grad.dtype)).full_tensor())
        elif parameter.grad.numel():
            whole.append(parameter)
    for (_, dtype), gradients in _by_kind(whole).items():
        if foreach is not False and dtype in (torch.float32, torch.float64):  # others are to be summed in float32
            norms += norms_of(gradients, p)
        else:
            norms += [torch.linalg.vector_norm(gradient, p, dtype=_wide(dtype)) for gradient in gradients]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]), p)


def _by_kind(parameters: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Local gradients by device and dtype."""
    gradients: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            gradients[gradient.device, gradient.dtype].append(gradient)
    return gradients


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
