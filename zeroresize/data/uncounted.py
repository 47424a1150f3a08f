"""What does not count: the gradients of a rank that counts nothing, and buffers of one without samples.

Such a rank computes a sample, so that all ranks have the same collectives. Its loss times 0 would have gradients of NaN
where it is NaN, as is a mean over no tokens: so gradients of the model's results are exactly 0, whatever comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.utils.torch_state import remove_all, tensors_in


class UncountedForwards:
    """Drops gradients of a model's results while ``drops`` says so, and what forwards without samples do to buffers.

    ``drops`` is asked in the backward, so that no other backward, as of an evaluation between steps, is touched.
    """

    def __init__(self, model: nn.Module, without_samples: Callable[[], bool], drops: Callable[[], bool]) -> None:
        self._without_samples, self._drops = without_samples, drops
        self._buffers = list[tuple[Tensor, Tensor]]()
        self._hooks = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end),
        ]

    def close(self) -> None:
        """Take the hooks back."""
        remove_all(self._hooks)

    def _begin(self, module: nn.Module, _: Any) -> None:
        is_kept = module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        buffers = module.buffers() if is_kept and self._without_samples() else ()
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]

    def _end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for buffer, before in self._buffers:
            if not torch.equal(buffer, before):
                buffer.data.copy_(before)  # unnoticed by autograd, which may have saved the buffer
        self._buffers = []
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for tensor in tensors_in(outputs):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._kept)

    def _kept(self, gradient: Tensor | None) -> Tensor | None:
        # DDP has none for results that the loss did not use.
        return torch.zeros_like(gradient) if gradient is not None and self._drops() else None
