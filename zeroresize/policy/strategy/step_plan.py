"""Which strategies a mini-batch's sequences visit, and in which micro-batches; from lengths alone, pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroresize.plan.length_range import LengthRange, range_of
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.packing import MicroBatch, Work, num_tokens, spread_and_pack


@dataclass(frozen=True)
class Visit:
    """Describe what one strategy trains in a step: the sequences of all ranges that it has.

    Attributes:
        up_to: of its ranges.
        replicas: [dp] the micro-batches of each, of the numbers of the sequences in the mini-batch.
    """

    strategy: Strategy
    up_to: tuple[int, ...]
    replicas: tuple[tuple[MicroBatch, ...], ...]

    @property
    def members(self) -> list[int]:
        """Return the numbers of all sequences of the visit."""
        return [number for own in self.replicas for micro_batch in own for number in micro_batch]


def plan_visits(lengths: Sequence[int], ranges: Sequence[LengthRange], work: Work = num_tokens) -> list[Visit]:
    """Return one visit of each strategy that has sequences, in the order of the ranges; the others have nothing to do.

    Ranges of one strategy are one visit, with the largest of their limits.

    Args:
        lengths: of the mini-batch's sequences, in tokens.
        ranges: all of them with ``max_tokens``.
        work: by which replicas share the sequences.

    Raises:
        ValueError: for a sequence that is longer than the last range, naming it.
    """
    members: dict[Strategy, list[int]] = {one.strategy: [] for one in ranges}
    for number, length in enumerate(lengths):
        try:
            members[ranges[range_of(ranges, length)].strategy].append(number)
        except ValueError as error:
            raise ValueError(f"sequence {number}: {error}") from error
    return [_visit(strategy, own, lengths, ranges, work) for strategy, own in members.items() if own]


def _visit(
    strategy: Strategy, members: Sequence[int], lengths: Sequence[int], ranges: Sequence[LengthRange], work: Work
) -> Visit:
    of_strategy = [one for one in ranges if one.strategy == strategy]
    max_tokens = max(one.max_tokens or one.up_to for one in of_strategy)
    replicas = spread_and_pack([lengths[number] for number in members], max_tokens, strategy.dp, work)
    return Visit(
        strategy,
        tuple(one.up_to for one in of_strategy),
        tuple(tuple(tuple(members[place] for place in packed) for packed in own) for own in replicas),
    )
