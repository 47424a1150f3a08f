"""What trainers need that are handed one micro-batch after another, of steps whose batches ranks have unevenly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroresize.utils.torch_state import tensors_in


def num_samples(batch: Any) -> int:
    """Return the length of a batch's first tensor."""
    first = next(tensors_in(batch), None)
    if first is None or not first.ndim:
        raise ValueError(f"a {type(batch).__name__} that begins with no rows does not tell its samples: give counted")
    return len(first)


def weights(counted: Sequence[Any]) -> Tensor:
    """Return what share each micro-batch is of the rank's step, in float64."""
    counted_M = torch.stack([torch.as_tensor(each, dtype=torch.float64) for each in counted])
    return counted_M / counted_M.sum().clamp(min=1.0)


def weighed(loss: Tensor, factor: Tensor) -> Tensor:
    """Return a loss times its factor; 0 where that is 0, even of a mean over nothing."""
    return torch.where(factor == 0.0, 0.0, loss * factor)


class UnevenSteps:
    """Iterates over micro-batches, and weighs the mean loss of each, so that sums are the mean of the global batch.

    Args:
        balancer: a :class:`zeroresize.DataBalancer`.
        loader: over its sampler, or stream.
        counted: returns over how many tokens a micro-batch takes its mean loss; None for samples.
        divided_by: what the trainer divides losses by.
    """

    def __init__(
        self, balancer: Any, loader: Iterable[Any], counted: Callable[[Any], Any] | None = None, divided_by: int = 1
    ) -> None:
        self.balancer, self._loader, self._count = balancer, loader, counted or num_samples
        self.divided_by = divided_by
        self._counted, self._number, self._is_scaled = list[Any](), -1, True
        self._scale: Any = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for micro_batches in self.balancer.steps(self._loader):
            self._counted, self._scale = list(map(self._count, micro_batches)), None
            for self._number, micro_batch in enumerate(micro_batches):
                self._is_scaled = False
                yield micro_batch
                self.require_scaled()

    @property
    def is_last(self) -> bool:
        """Whether the present micro-batch is the last one of its step."""
        return self._number == len(self._counted) - 1

    def scaled(self, loss: Tensor) -> Tensor:
        """Return what the present micro-batch's mean loss adds; collective with the first one of a step."""
        if self._is_scaled:
            raise RuntimeError("the loss of a micro-batch is scaled once, and there is none, or it was")
        if self._scale is None:
            self._scale = self.balancer.loss_scale(sum(self._counted))
        self._is_scaled = True
        share = weights(self._counted)[self._number].to(self._scale)
        return weighed(loss, self.divided_by * self._scale * share)

    def require_scaled(self) -> None:
        """Raise RuntimeError where the loss of the present micro-batch was not scaled."""
        if not self._is_scaled:
            raise RuntimeError("the loss of a micro-batch was not scaled, so ranks with fewer samples weigh as others")
