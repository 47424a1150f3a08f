"""What iterations were, on average: for ``metrics.jsonl`` and the summary."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from zeroresize.microbatch.trainer import IterationReport
from zeroresize.utils.value_checks import known_keys


@dataclass
class StepSums:
    """Sums over iterations, of which none is kept; seconds are those of this rank."""

    num_steps: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    wait_s: float = 0.0
    work_s: float = 0.0
    expected_s: float = 0.0
    tokens: int = 0
    computed_tokens: int = 0
    micro_batches: int = 0
    recomputed: int = 0

    def add(self, report: IterationReport, tokens: int) -> None:
        """One more iteration, whose samples have so many tokens."""
        self.num_steps += 1
        self.loss += report.loss
        self.seconds += report.seconds
        self.wait_s += report.wait_s
        self.work_s += report.work_s
        self.expected_s += report.expected_s
        self.tokens += tokens
        self.computed_tokens += report.computed_tokens
        self.micro_batches += sum(report.num_microbatches)
        self.recomputed += report.recomputation != "none"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Any) -> StepSums:
        """What :meth:`to_dict` returned.

        Raises:
            ValueError: for anything else.
        """
        sums = known_keys("sum", values, [each.name for each in fields(StepSums)])
        if not all(isinstance(value, int | float) for value in sums.values()):
            raise ValueError("sums over steps hold something else than numbers")
        return StepSums(**sums)

    def means(self) -> dict[str, float]:
        """Of an iteration, where there is at least one."""
        count = self.num_steps
        return {
            "loss": self.loss / count,
            "step_s": self.seconds / count,
            "wait_s": self.wait_s / count,
            "work_s": self.work_s / count,
            "expected_s": self.expected_s / count,
            "tokens_per_s": self.tokens / self.seconds,
            "padding": 1.0 - self.tokens / self.computed_tokens,
            "micro_batches": self.micro_batches / count,
            "recomputed": self.recomputed / count,
        }
