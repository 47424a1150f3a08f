"""What steps were, on average: for ``metrics.jsonl`` and the summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from zeroresize.strategy.step_report import StepReport
from zeroresize.utils.value_checks import known_keys


@dataclass
class _Visits:
    """All visits of one strategy."""

    up_to: tuple[int, ...]
    sequences: int = 0
    tokens: int = 0
    micro_batches: int = 0
    seconds: float = 0.0

    @staticmethod
    def from_dict(values: Any) -> _Visits:
        sums = dict(known_keys("sum", values, [one.name for one in fields(_Visits)]))
        up_to = sums.pop("up_to", None)
        if not isinstance(up_to, list | tuple) or not all(
            isinstance(value, int | float) for value in (*up_to, *sums.values())
        ):
            raise ValueError("sums over visits of a strategy hold something else than numbers")
        return _Visits(tuple(up_to), **sums)


@dataclass
class StepSums:
    """Sums over steps, of which none is kept; seconds are those of this rank."""

    num_steps: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    switch_s: float = 0.0
    tokens: int = 0
    visits: dict[str, _Visits] = field(default_factory=dict)

    def add(self, report: StepReport) -> None:
        """One more step."""
        self.num_steps += 1
        self.loss += report.loss
        self.seconds += report.seconds
        self.switch_s += sum(one.seconds for one in report.switches)
        self.tokens += report.num_tokens
        for visit in report.by_range:
            visits = self.visits.setdefault(str(visit.strategy), _Visits(visit.up_to))
            visits.sequences += visit.num_sequences
            visits.tokens += visit.num_tokens
            visits.micro_batches += sum(visit.num_micro_batches)
            visits.seconds += visit.seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Any) -> StepSums:
        """What :meth:`to_dict` returned.

        Raises:
            ValueError: for anything else.
        """
        sums = dict(known_keys("sum", values, [one.name for one in fields(StepSums)]))
        visits = sums.pop("visits", {})
        if not isinstance(visits, Mapping) or not all(isinstance(one, int | float) for one in sums.values()):
            raise ValueError("sums over steps hold something else than numbers")
        return StepSums(**sums, visits={strategy: _Visits.from_dict(one) for strategy, one in visits.items()})

    def means(self) -> dict[str, Any]:
        """Of a step, where there is at least one.

        Returns:
            ``loss``, ``step_s``, ``tokens_per_s``, ``switch_s`` (with the sum of the gradients over the replicas of the
            optimizer's strategy) and, shortest sequences first, ``ranges``: what each strategy trained in a step, in
            how many seconds.
        """
        count = self.num_steps
        return {
            "loss": self.loss / count,
            "step_s": self.seconds / count,
            "tokens_per_s": self.tokens / self.seconds,
            "switch_s": self.switch_s / count,
            "ranges": [
                {
                    "up_to": list(visits.up_to),
                    "strategy": strategy,
                    "sequences": visits.sequences / count,
                    "tokens": visits.tokens / count,
                    "micro_batches": visits.micro_batches / count,
                    "seconds": visits.seconds / count,
                }
                for strategy, visits in sorted(self.visits.items(), key=lambda one: one[1].up_to)
            ],
        }
