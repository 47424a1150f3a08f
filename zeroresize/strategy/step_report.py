"""What a step with several strategies was."""

from __future__ import annotations

from dataclasses import dataclass

from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.switching.switch import SwitchReport


@dataclass(frozen=True)
class RangeReport:
    """Tells what one strategy trained in a step: the sequences of its ranges of lengths.

    Attributes:
        up_to: of its ranges.
        num_sequences, num_tokens: of all replicas.
        num_micro_batches: of each replica.
        seconds: on this rank, without the switch to the strategy.
    """

    strategy: Strategy
    up_to: tuple[int, ...]
    num_sequences: int
    num_tokens: int
    num_micro_batches: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class StepReport:
    """Tells what an optimizer's step computed and how long it took.

    Attributes:
        loss: mean over the tokens of the whole mini-batch, the same on every rank.
        num_tokens: of it, to be predicted.
        seconds: on this rank.
        by_range: in the order in which the strategies were visited.
        switches: to each of them that was not in force, and the optimizer's strategy; as this rank saw them.
        grad_norm: of the whole model, before clipping.
        is_skipped: the loss or the norm was not finite, so the optimizer did not step.
    """

    loss: float
    num_tokens: int
    seconds: float
    by_range: tuple[RangeReport, ...]
    switches: tuple[SwitchReport, ...]
    grad_norm: float
    is_skipped: bool = False
