"""What steps were, on average: for ``metrics.jsonl`` and the summary."""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass
class StepSums:
    """Sums over steps, of which none is kept; seconds are those of this rank."""

    num_steps: int = 0
    _loss: float = 0.0
    _seconds: float = 0.0
    _switch_s: float = 0.0
    _tokens: int = 0
    _visits: dict[str, _Visits] = field(default_factory=dict)

    def add(self, report: StepReport) -> None:
        """One more step."""
        self.num_steps += 1
        self._loss += report.loss
        self._seconds += report.seconds
        self._switch_s += sum(one.seconds for one in report.switches)
        self._tokens += report.num_tokens
        for visit in report.by_range:
            own = self._visits.setdefault(str(visit.strategy), _Visits(visit.up_to))
            own.sequences += visit.num_sequences
            own.tokens += visit.num_tokens
            own.micro_batches += sum(visit.num_micro_batches)
            own.seconds += visit.seconds

    def means(self) -> dict[str, Any]:
        """Of a step, where there is at least one.

        Returns:
            ``loss``, ``step_s``, ``tokens_per_s``, ``switch_s`` (with the sum of the gradients over home's replicas)
            and, shortest sequences first, ``ranges``: what each strategy trained in a step, in how many seconds.
        """
        count = self.num_steps
        return {
            "loss": self._loss / count,
            "step_s": self._seconds / count,
            "tokens_per_s": self._tokens / self._seconds,
            "switch_s": self._switch_s / count,
            "ranges": [
                {
                    "up_to": list(own.up_to),
                    "strategy": strategy,
                    "sequences": own.sequences / count,
                    "tokens": own.tokens / count,
                    "micro_batches": own.micro_batches / count,
                    "seconds": own.seconds / count,
                }
                for strategy, own in sorted(self._visits.items(), key=lambda one: one[1].up_to)
            ],
        }
