"""What a rank's mean loss weighs in a step, and what of the step does not count.

A rank without samples computes one, so that all ranks have the same collectives. Its loss times 0 would have gradients
of NaN where it is NaN, as is a mean over no tokens: so gradients of the model's results are exactly 0, whatever comes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import all_reduce, message_device
from zeroresize.comm.exchange import Meet
from zeroresize.data.start_checks import batch_norms_of, require_no_batch_norm
from zeroresize.data.timetable import Timetable
from zeroresize.resharding.agreement import agreed
from zeroresize.utils.torch_state import remove_all, tensors_in


class LossScale:
    """Scales a model's loss once in each step, and drops gradients and buffers of what does not count.

    Gradients are dropped in the backward, so that no other one, as of an evaluation between steps, is touched.

    Args:
        group: over which a GPU sums what counts; None where there are no other ranks.
        meet: by which the host does.
    """

    def __init__(self, model: nn.Module, timetable: Timetable, group: ProcessGroup | None, meet: Meet) -> None:
        self._timetable, self._group, self._meet = timetable, group, meet
        self._device = next((each.device for each in model.parameters()), torch.device("cpu"))
        where = self._device if group is None else message_device(group, self._device)
        self._sums_on_host = where.type == "cpu"
        self.norms = batch_norms_of(model)
        self._is_given = False
        self._drops: bool | Tensor = False
        self._buffers = list[tuple[Tensor, Tensor]]()
        self._hooks = [
            model.register_forward_pre_hook(self._forward_begins, prepend=True),
            model.register_forward_hook(self._forward_ends),
        ]

    def give(self, counted: float | Tensor | None) -> Tensor:
        """Return the scale of this step, as :meth:`~zeroresize.data.data_balancer.DataBalancer.loss_scale` does."""
        if self._is_given:
            raise RuntimeError(
                f"loss_scale() was called twice in step {self._timetable.num_steps}: it is called once for all "
                "micro-batches of a step (num_micro_batches, steps()), and step() after each step of the optimizer"
            )
        if not all(isinstance(norm, nn.SyncBatchNorm) for norm in self.norms.values()):  # ranks may set them unlike
            agreed(self._meet, partial(require_no_batch_norm, self.norms), what="the scale of a loss")
        count = partial(self._counted_here, counted)
        total: float | Tensor
        if counted is None:
            mine, total = count(), self._timetable.fetched_part.total
        elif self._sums_on_host:
            mine, table = agreed(self._meet, count, lambda number: (float(number),), what="the scale of a loss")
            total = math.fsum(number for number, *_ in table)
        else:  # nobody reads it
            mine = count()
            total = self._tensor(mine).clone()
            if self._group is not None:
                all_reduce(total, self._group)
        self._is_given, self._drops = True, mine == 0.0
        least = torch.finfo(torch.float64).tiny
        return self._timetable.num_ranks * self._tensor(mine) / self._tensor(total).clamp(min=least)

    def require(self) -> None:
        """Raise RuntimeError where the loss of this step has no scale."""
        if not self._is_given:
            raise RuntimeError(
                "the optimizer steps, or step() is called, without loss_scale(): the gradient is not that of the "
                "global batch, as ranks with fewer samples weigh as much as others: call it once a step, before the "
                "first backward, and close() a balancer that this optimizer had before"
            )

    def end_step(self) -> None:
        """Let the next step have a scale of its own."""
        self.require()
        self._is_given = self._drops = False

    def close(self) -> None:
        """Take the hooks back."""
        remove_all(self._hooks)

    def _counted_here(self, counted: float | Tensor | None) -> float | Tensor:
        """Over how much this rank's mean is taken; a tensor where only a GPU knows it."""
        samples = self._timetable.fetched_part.num_samples
        known = samples if counted is None or not samples else counted
        if isinstance(known, Tensor) and known.numel() != 1:
            shape = tuple(known.shape)
            raise ValueError(f"loss_scale: counted of shape {shape} is not allowed: one number is needed, a mask's sum")
        if isinstance(known, Tensor) and known.device.type != "cpu" and not self._sums_on_host:
            return known.reshape(())
        if not 0.0 <= (number := float(known)) < math.inf:
            raise ValueError(f"loss_scale: counted={counted!r} is not allowed: a finite number of at least 0 is needed")
        return number

    def _tensor(self, number: float | Tensor) -> Tensor:
        return torch.as_tensor(number, dtype=torch.float64, device=self._device)

    def _forward_begins(self, module: nn.Module, _: Any) -> None:
        part = self._timetable.part if module.training and _is_heard() else None
        buffers = module.buffers() if part is not None and not part.num_samples else ()
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]

    def _forward_ends(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for buffer, before in self._buffers:
            if not torch.equal(buffer, before):
                buffer.data.copy_(before)  # unnoticed by autograd, which may have saved the buffer
        self._buffers = []
        for tensor in tensors_in(outputs) if _is_heard() else ():
            if tensor.grad_fn is not None:
                tensor.register_hook(self._kept)

    def _kept(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or self._drops is False:  # DDP has none for results that the loss did not use
            return None
        return torch.zeros_like(gradient) if self._drops is True else gradient.masked_fill(self._drops, 0.0)


def _is_heard() -> bool:
    """Whether a forward is one of training, and no compiled code, which hears no hooks."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()
