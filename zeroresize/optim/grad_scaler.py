"""Loss scaling where gradients overflow on some ranks only: the step is skipped on all of them or on none."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.optim import Optimizer

from zeroresize.comm.collectives import all_reduce, as_process_group, message_device
from zeroresize.layers.local_parts import local_of
from zeroresize.utils.checked import checked
from zeroresize.utils.torch_private import GradScalerBase, check_and_unscale


@checked()
class GradScaler(GradScalerBase):
    """A ``torch.amp.GradScaler`` for ranks that hold different parts of a model, plain tensors and DTensors alike::

        scaler = zr.GradScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        zr.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()

    Where gradients are not finite on one rank, all skip the step and lower their scale, whether they differ by tensor,
    pipeline or data parallelism. It begins with its scale, so the stages of a pipeline that compute no loss have it,
    too. ``unscale_``, or ``step`` without it, is collective, once for each optimizer, also on a rank without gradients.

    Args:
        device: where losses are, as ``"cuda"`` or ``"cpu"``.
        process_group: the ranks that train one model, or a one-dimensional ``DeviceMesh`` of them; None for all ranks
            of the job.
        options: ``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval`` and ``enabled``, as of
            ``torch.amp.GradScaler``; alike on all ranks.

    Raises:
        ValueError: for a group without this rank; from ``unscale_``, on all ranks, for gradients in float16.
        RuntimeError: from ``unscale_`` or ``step``, if a rank does not come within the time limit of the group.
    """

    def __init__(
        self, device: str = "cuda", *, process_group: ProcessGroup | DeviceMesh | None = None, **options: Any
    ) -> None:
        super().__init__(device, **options)
        self._group: ProcessGroup | None = as_process_group(process_group)

    @torch.no_grad()
    def unscale_gradients(self, optimizer: Optimizer, inv_scale: Tensor, *, allow_fp16: bool) -> Tensor:
        """Unscale what this rank holds of the gradients; return whether some rank's are not finite; collective."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
                gradient = parameter.grad.values() if parameter.grad.is_sparse else local_of(parameter.grad)
                if gradient.numel():
                    by_kind[gradient.device, gradient.dtype].append(gradient)
        is_half = not allow_fp16 and any(dtype is torch.float16 for _, dtype in by_kind)
        seen = torch.tensor([0.0, float(is_half)], dtype=torch.float32, device=inv_scale.device)
        for gradients in [] if is_half else by_kind.values():
            seen[0] += check_and_unscale(gradients, inv_scale).to(seen.device)
        group = self._group or (dist.group.WORLD if dist.is_initialized() else None)
        if group is not None:
            message = seen.to(message_device(group, seen.device))
            all_reduce(message, group)
            seen = message.to(seen.device)
        if not allow_fp16 and seen[1] > 0.0:
            raise ValueError(
                "gradients are in float16 on some rank, and too coarse to be unscaled: keep parameters in float32, and "
                "compute in float16 by torch.autocast"
            )
        return seen[0].clamp(max=1.0)
