"""1F1B of one replica's stages over any number of micro-batches, each with as many tokens as it has.

``torch.distributed.pipelining`` fits neither: its stages hand on tensors of one static shape, and its 1F1B refuses
fewer micro-batches than stages. Few long sequences are exactly that.

Each stage first runs as many forwards as there are stages behind it, then one forward and one backward in turn, so that
at most that many micro-batches' activations are held (PipeDream-Flush, as Megatron-LM runs it). One stage is plain
gradient accumulation. Gradients are added to those of the parameters.

What a forward draws at random is a function of the stage's seed and the number of the micro-batch. Under
``torch.autocast`` stages hand on activations, and gradients, in the dtype that they have without it, and a backward
runs outside of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank, group_size
from zeroresize.layers.autocast import autocast_dtype
from zeroresize.strategy.packed import Packed
from zeroresize.strategy.running.activations import Activation
from zeroresize.strategy.running.neighbours import AdjacentStage, Neighbour, Nobody
from zeroresize.strategy.running.random_numbers import drawing_from, seed_of

#: Of the last layer's output and its micro-batch; a sum over tokens.
Loss = Callable[[Tensor, Packed], Tensor]


@contextmanager
def _weights_cast_anew() -> Iterator[None]:
    """Make autocast forget what it has cast, before and after: an optimizer or a switch changes the weights."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


class PipelineStage:
    """Runs a rank's neighbouring layers of one replica, between the stages before and behind, in 1F1B.

    Args:
        layers: of this stage, in order; called ``layer(x, packed)``.
        first: number of the first of them in the model.
        activations: [L − 1] between all layers of the model, of :func:`~zeroresize.strategy.running.activations
            .find_activations`.
        process_group: the pipeline's, first stage first; None where there is one stage only.
        device: of the layers.
        seed: of 64 bits, of what the layers draw at random; alike on the ranks that divide the stage's layers.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int,
        activations: Sequence[Activation],
        process_group: ProcessGroup | None,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self._layers, self._device, self._seed = layers, device, seed
        self._handed_on: Activation | None = None
        self._before: Neighbour = Nobody()
        self._behind: Neighbour = Nobody()
        self._num_behind = 0
        if process_group is None:
            return
        index, last = group_rank(process_group), group_size(process_group) - 1
        self._num_behind = last - index
        if index > 0:
            self._before = AdjacentStage(process_group, index - 1, activations[first - 1], device)
        if index < last:
            self._handed_on = activations[first + len(layers) - 1]
            self._behind = AdjacentStage(process_group, index + 1, self._handed_on, device)

    @property
    def is_last(self) -> bool:
        return self._num_behind == 0

    @_weights_cast_anew()
    def train(self, micro_batches: Sequence[Packed], loss: Loss) -> Tensor:
        """Run all micro-batches forward and backward; all stages of the replica are given the same ones.

        Returns:
            The sum of the losses, a float64 scalar; zero on other stages than the last one.

        Raises:
            RuntimeError: if a neighbour does not come, naming it.
        """
        before, behind = self._before, self._behind
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        in_flight: deque[tuple[Tensor, Tensor]] = deque()

        def forward(number: int, x: Tensor | None) -> Tensor:
            packed = micro_batches[number]
            x = packed.tokens if x is None else x.requires_grad_()
            with torch.enable_grad():
                y = self._run(x, number, packed, loss)
            if self.is_last:
                total.add_(y.detach())
            in_flight.append((x, y))
            return y

        def backward(dy: Tensor | None) -> Tensor | None:
            x, y = in_flight.popleft()
            if y.requires_grad:
                with _without_autocast(self._device):
                    torch.autograd.backward(y, dy)
            if not x.is_floating_point():
                return None
            return x.grad if x.grad is not None else torch.zeros_like(x)

        sizes = [packed.num_tokens for packed in micro_batches] + [0]
        num_warmup = min(self._num_behind, len(micro_batches))
        for number in range(num_warmup):
            behind.exchange(forward(number, before.exchange(num_tokens=sizes[number])))
        x = before.exchange(num_tokens=sizes[num_warmup])
        for number in range(num_warmup, len(micro_batches)):
            y = forward(number, x)
            dx = backward(behind.exchange(y, sizes[number - num_warmup]))
            x = before.exchange(dx, sizes[number + 1])
        for size in sizes[len(micro_batches) - num_warmup : -1]:
            before.exchange(backward(behind.exchange(num_tokens=size)))
        before.finish()
        behind.finish()
        return total

    @torch.no_grad()
    @_weights_cast_anew()
    def evaluate(self, micro_batches: Sequence[Packed], loss: Loss) -> Tensor:
        """Return the sum of the losses as :meth:`train` does, without gradients; errors as there."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, packed in enumerate(micro_batches):
            x = self._before.exchange(num_tokens=packed.num_tokens)
            y = self._run(packed.tokens if x is None else x, number, packed, loss)
            self._behind.finish()
            self._behind.exchange(y)
            if self.is_last:
                total += y
        self._behind.finish()
        return total

    def _run(self, x: Tensor, number: int, packed: Packed, loss: Loss) -> Tensor:
        """What is handed on, or the loss on the last stage, of this micro-batch."""
        with drawing_from(seed_of(self._seed, number), self._device):
            for layer in self._layers:
                x = layer(x, packed)
            if self._handed_on is None:
                return loss(x, packed)
        return x.to(self._handed_on.dtype) if autocast_dtype(self._device.type) else x


def _without_autocast(device: torch.device) -> torch.autocast:
    """Turn autocast off for a backward, which computes in the types of its forward."""
    return torch.autocast(device.type, enabled=False)
