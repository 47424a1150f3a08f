"""Runs a rank's neighbouring layers for the micro-batches of a step.

What a forward draws at random is a function of the stage's seed and the number of the micro-batch, so that ranks that
hold copies of what is not divided drop the same elements of it, whatever they drew before. Under ``torch.autocast``
stages hand on activations, and gradients, in the dtype that they have without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from zeroresize.comm.collectives import group_rank, group_size
from zeroresize.runtime.activations import Batch, HandedOn, Tensors, as_argument, as_tuple
from zeroresize.runtime.executor import Executor
from zeroresize.runtime.instructions import Instruction, forward_instructions
from zeroresize.runtime.messages import StageMessages
from zeroresize.utils.hashing import mixed
from zeroresize.utils.torch_state import autocast_dtype
from zeroresize.utils.value_checks import one_of

#: Of the last layer's output and its micro-batch, its part of the step's loss.
LossPart = Callable[[Any, Any], Tensor]
#: What is computed again in backwards instead of being kept: nothing, the attention of layers that have an attribute
#: ``recompute``, or whole layers.
RECOMPUTATIONS = ("none", "attention", "layers")


@contextmanager
def weights_cast_anew() -> Iterator[None]:
    """Make autocast forget what it has cast, before and after: an optimizer or a switch changes the weights."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def set_recomputation(layers: Iterable[nn.Module], recompute: str) -> bool:
    """Let layers recompute their attention where that is wanted; return whether they are to be recomputed whole."""
    one_of("recompute", recompute, RECOMPUTATIONS)
    for module in (module for layer in layers for module in layer.modules()):
        if hasattr(module, "recompute"):
            module.recompute = recompute == "attention"  # type: ignore[assignment]
    return recompute == "layers"


class Stage:
    """Runs a rank's neighbouring layers of one replica, between the stages before and behind, as it is told.

    Args:
        layers: of this stage, in order; called ``layer(x, batch)``.
        first: number of the first of them in the model.
        activations: [L − 1] between all layers of the model, of
            :func:`~zeroresize.runtime.activations.find_activations`.
        process_group: the pipeline's, first stage first; None where there is one stage only.
        device: of the layers.
        seed: of 64 bits, of what the layers draw at random; alike on the ranks that divide the stage's layers.
        recompute: what is computed again in backwards, of :data:`RECOMPUTATIONS`.
        on_computed: is told each forward and backward once it is over, see
            :class:`~zeroresize.runtime.executor.Executor`.

    Raises:
        ValueError: for another ``recompute``.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int,
        activations: Sequence[HandedOn],
        process_group: ProcessGroup | None,
        device: torch.device,
        seed: int = 0,
        *,
        recompute: str = "none",
        on_computed: Callable[[Instruction], object] | None = None,
    ) -> None:
        self._layers, self._device, self._seed = layers, device, seed
        self._recomputes_layers = set_recomputation(layers, recompute)
        self._group = None if process_group is None or group_size(process_group) == 1 else process_group
        self._number, self._num_stages = 0, 1
        self._before: HandedOn = ()
        self._behind: HandedOn = ()
        if self._group is not None:
            self._number, self._num_stages = group_rank(self._group), group_size(self._group)
            if self._number:
                self._before = activations[first - 1]
            if not self.is_last:
                self._behind = activations[first + len(layers) - 1]
        self._on_computed = on_computed

    @property
    def is_last(self) -> bool:
        """Whether it is the last stage."""
        return self._number == self._num_stages - 1

    @weights_cast_anew()
    def train(self, instructions: Sequence[Instruction], batches: Sequence[Batch], loss: LossPart) -> Tensor:
        """Run micro-batches [M] forward and backward as told; gradients are added to those of the parameters.

        Returns:
            The sum of the losses, a float64 scalar; zero on other stages than the last one.

        Raises:
            ValueError, RuntimeError: as :meth:`~zeroresize.runtime.executor.Executor.carry_out`.
        """
        return self._run(instructions, batches, loss, trains=True)

    @torch.no_grad()
    @weights_cast_anew()
    def evaluate(self, batches: Sequence[Batch], loss: LossPart) -> Tensor:
        """Return the sum of the losses as :meth:`train` does, without gradients."""
        return self._run(
            forward_instructions(self._number, self._num_stages, len(batches)), batches, loss, trains=False
        )

    def _run(
        self, instructions: Sequence[Instruction], batches: Sequence[Batch], loss: LossPart, *, trains: bool
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)

        def forward(microbatch: int, xs: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
            ys = as_tuple(self._forward(microbatch, xs, batches[microbatch], loss if self.is_last else None))
            if self.is_last:
                total.add_(ys[0].detach())
            return ys

        messages = None
        if self._group is not None:
            before, behind = (
                {number: tuple(one.of(batch.sizes) for one in handed) for number, batch in enumerate(batches)}
                for handed in (self._before, self._behind)
            )
            messages = StageMessages(self._group, self._device, list(before), before, behind)
        with torch.set_grad_enabled(trains):
            Executor(forward, messages, trains=trains, on_computed=self._on_computed).carry_out(instructions)
        return total

    def _forward(self, number: int, xs: tuple[Tensor, ...] | None, batch: Batch, loss: LossPart | None) -> Tensors:
        """What is handed on, or the loss on the last stage, of this micro-batch."""
        x = batch.inputs if xs is None else as_argument(xs)
        with drawing_from(seed_of(self._seed, number), self._device):
            for layer in self._layers:
                is_again = self._recomputes_layers and torch.is_grad_enabled()
                x = checkpoint(layer, x, batch, use_reentrant=False) if is_again else layer(x, batch)
            if loss is not None:
                return loss(x, batch)
        if self.is_last or not autocast_dtype(self._device.type):
            return x
        return tuple(y.to(handed.dtype) for y, handed in zip(as_tuple(x), self._behind, strict=True))


def seed_of(*numbers: int) -> int:
    """Return 64 bits of a hash of these numbers, in this order."""
    return reduce(mixed, numbers, 0)


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Start torch's generators of the CPU and of ``device`` from a seed of 64 bits; afterwards they are as before."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
