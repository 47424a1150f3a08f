"""What steps were, on average: for ``metrics.jsonl`` and the summary."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zeroresize.strategy.step_report import StepReport


@dataclass
class _Visits:
    """All visits of one strategy."""

    up_to: tuple[int, ...]
    sequences: int = 0
    tokens: int = 0
    micro_batches: int = 0
    seconds: float = 0.0


def numbers_of(reports: Sequence[StepReport]) -> dict[str, Any]:
    """Means over steps, of which there is at least one; seconds are those of this rank.

    Returns:
        ``loss``, ``step_s``, ``tokens_per_s``, ``switch_s`` and, shortest sequences first, ``ranges``: what each
        strategy trained in a step, in how many seconds.
    """
    found: dict[str, _Visits] = {}
    for report in reports:
        for visit in report.by_range:
            own = found.setdefault(str(visit.strategy), _Visits(visit.up_to))
            own.sequences += visit.num_sequences
            own.tokens += visit.num_tokens
            own.micro_batches += sum(visit.num_micro_batches)
            own.seconds += visit.seconds
    count = len(reports)
    step_s = statistics.fmean(one.seconds for one in reports)
    return {
        "loss": statistics.fmean(one.loss for one in reports),
        "step_s": step_s,
        "tokens_per_s": statistics.fmean(one.num_tokens for one in reports) / step_s,
        "switch_s": statistics.fmean(sum(switch.seconds for switch in one.switches) for one in reports),
        "ranges": [
            {
                "up_to": list(own.up_to),
                "strategy": strategy,
                "sequences": own.sequences / count,
                "tokens": own.tokens / count,
                "micro_batches": own.micro_batches / count,
                "seconds": own.seconds / count,
            }
            for strategy, own in sorted(found.items(), key=lambda one: one[1].up_to)
        ],
    }
