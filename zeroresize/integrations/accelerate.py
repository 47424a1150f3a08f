"""Uneven batches in a loop with an Accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from accelerate.data_loader import DataLoaderStateMixin
from accelerate.utils import send_to_device
from torch import Tensor

from zeroresize.integrations.uneven_steps import UnevenSteps


class UnevenBatches(UnevenSteps, DataLoaderStateMixin):
    """A balancer's batches for a loop with an ``Accelerator``, in place of a prepared loader: docs/data_parallel.md.

    Steps of ``accelerator.accumulate`` are those of the balancer, which ``accelerator.save_state`` saves, too.

    Args:
        accelerator: with ``gradient_accumulation_steps`` as the balancer's ``num_micro_batches``.
        balancer: of the prepared model and optimizer.
        loader: over the balancer's sampler, or stream, not prepared; batches come on the accelerator's device.
        counted: returns over how many tokens a micro-batch takes its mean loss; None for samples.
    """

    def __init__(
        self, accelerator: Any, balancer: Any, loader: Iterable[Any], counted: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(balancer, loader, counted, accelerator.gradient_accumulation_steps)
        self._accelerator, self.gradient_state = accelerator, accelerator.gradient_state
        accelerator.register_for_checkpointing(balancer)

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            for batch in super().__iter__():
                self.end_of_dataloader = self.is_last  # where accumulate() ends a step
                yield send_to_device(batch, self._accelerator.device)
        finally:
            self.end()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return what is given to ``accelerator.backward`` for a micro-batch's mean loss, as :meth:`backward` does.

        Raises:
            RuntimeError: a second time, and outside of ``accelerator.accumulate``.
        """
        if self._accelerator.sync_gradients != self.is_last:
            raise RuntimeError(
                "the optimizer would not step with the last micro-batch of the balancer's step: compute each within "
                "accelerator.accumulate(model), with num_micro_batches=accelerator.gradient_accumulation_steps"
            )
        return super().scaled(loss)

    def backward(self, loss: Tensor) -> Tensor:
        """Call ``accelerator.backward`` of a micro-batch's mean loss, scaled; the mean over ranks of sums is the loss.

        Raises:
            RuntimeError: as :meth:`scaled`.
        """
        scaled = self.scaled(loss)
        self._accelerator.backward(scaled)
        return scaled.detach() / self.divided_by
