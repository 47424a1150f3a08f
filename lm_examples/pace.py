"""How long a rank's blocks take beyond what they compute: sleeps in place of work, and a straggler's slowness.

With ``sleep.forward_s`` a block sleeps, after its computation, ``forward_s`` × its ``work`` in forward. So a machine
with fewer cores than stages shows what a pipeline does: stages that sleep wait for nobody. Without, only a straggler
sleeps: (χ − 1) × the seconds that the block's forward has taken.

Backward sleeps as long again for each part of it that really runs: one for the gradients of activations, and one for
those of weights, unless all of the block's are frozen. Where autograd has no graph it does not sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Pace:
    """Of the blocks of one rank, by hooks that leave modules and names as they are. Evaluation is not held up.

    Args:
        forward_s: seconds that a dense block sleeps in forward; 0 for none.
        seconds_of: tells them instead, of the micro-batch that a block is called with besides its input.

    Attributes:
        chi: straggling skewness χ ≥ 1 of this rank; may be set.
        slept_s: seconds so far.
    """

    def __init__(self, forward_s: float = 0.0, seconds_of: Callable[[Any], float] | None = None) -> None:
        self.chi, self.slept_s = 1.0, 0.0
        self._forward_s, self._seconds_of = forward_s, seconds_of
        self._begun_s = 0.0

    def __deepcopy__(self, memo: object) -> Pace:
        return self  # of the rank, whatever copies of blocks there are

    @property
    def sleeps_for_work(self) -> bool:
        """Whether sleeps stand for all work, so that the rest of a step is idle."""
        return self._forward_s > 0.0 or self._seconds_of is not None

    def hold_up(self, blocks: Iterable[nn.Module]) -> None:
        """Attach to modules with an attribute ``work``."""
        for block in blocks:
            block.register_forward_pre_hook(self._before_forward)
            block.register_forward_hook(self._after_forward)

    def sleep(self, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds)
        self.slept_s += time.perf_counter() - begin

    def _before_forward(self, block: nn.Module, inputs: Any) -> None:
        self._begun_s = time.perf_counter()

    def _after_forward(self, block: Any, inputs: Any, outputs: Any) -> Any:
        first, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        if not block.training or first.is_meta:
            return outputs
        seconds = (self.chi - 1.0) * (time.perf_counter() - self._begun_s)
        if self._forward_s:
            seconds = self._forward_s * block.work * self.chi
        elif self._seconds_of is not None:
            seconds = self._seconds_of(inputs[1]) * self.chi
        if not seconds:
            return outputs
        self.sleep(seconds)
        num_parts = 2 if any(one.requires_grad for one in block.parameters()) else 1
        held_up = _SleepInBackward.apply(first, self, num_parts * seconds)
        return (held_up, *others) if isinstance(outputs, tuple) else held_up


class CountedBlocks:
    """Adds up the ``work`` of blocks over the micro-batches of a step, by hooks. Evaluation does not count.

    Args:
        blocks: modules with an attribute ``work``, a number.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._work: dict[nn.Module, float] = {}
        for block in blocks:
            self._work[block] = 0.0
            block.register_forward_hook(self._add)

    def __call__(self, layer: nn.Module) -> float:
        """Return the work of a layer since it was last asked for; 1 for anything but a block, as it never changes."""
        work = self._work.get(layer, 1.0)
        if layer in self._work:
            self._work[layer] = 0.0
        return work

    def _add(self, block: Any, inputs: Any, outputs: Any) -> None:
        if block.training:
            self._work[block] += block.work


class _SleepInBackward(torch.autograd.Function):
    """y = x; dx = dy, after some seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: Pace, seconds: float) -> Tensor:
        ctx.pace, ctx.seconds = pace, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.pace.sleep(ctx.seconds)
        return gradients[0], None, None
