"""Runs beside each other: their steps, how much faster than an unbalanced one they are, and what that cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.report.files import section_of
from scripts.report.run import RunFolder

#: Settings in which runs may differ that are compared: how they balance, how long they are, and where they write.
_MAY_DIFFER = ("training.epochs", "training.seed", "timeout_s", "total_steps")
_SECTIONS_MAY_DIFFER = ("balance", "output")
HEADINGS = ("run", "steps", "median step, ms", "mean step, ms", "speed-up", "accuracy", "moved", "lent", "dropped")


@dataclass(frozen=True)
class NamedRun:
    """A run by its name in the folder of runs."""

    name: str
    run: RunFolder

    @property
    def is_reference(self) -> bool:
        """Whether others may be compared with it: nothing is balanced in it."""
        return self.run.mode == "off"

    @property
    def is_called_baseline(self) -> bool:
        return self.is_reference and "baseline" in self.name.lower()


def references_of(runs: Sequence[NamedRun], run: NamedRun) -> list[NamedRun]:
    """Those in mode "off" that differ from ``run`` in nothing but how it balances, of its seed where there are any.

    Where all runs called Baseline have the same stragglers, it is they for every run, with other stragglers too. Empty
    where there is nothing to compare with.
    """
    baselines = [one for one in runs if one.is_called_baseline]
    if len({_settings(one, with_stragglers=True) for one in baselines}) == 1:
        like = [one for one in baselines if _is_like(one, run, with_stragglers=False)]
    else:
        like = [one for one in runs if one.is_reference and _is_like(one, run, with_stragglers=True)]
    return [one for one in like if _seed(one) == _seed(run)] or like


def comparison_rows(runs: Sequence[NamedRun]) -> list[list[str]]:
    """One row a run, as ``HEADINGS`` say."""
    rows = []
    for named in runs:
        speed = named.run.speed()
        references = [reference.run.speed()["step_ms"] for reference in references_of(runs, named)]
        ratio = statistics.fmean(references) / speed["step_ms"] if references else float("nan")
        accuracy = named.run.summary.get("test_accuracy")
        rows.append(
            [
                named.name,
                str(named.run.num_steps) if named.run.has_ended else f"{named.run.num_steps}, not ended",
                *(_number(speed[name], ".1f") for name in ("step_ms", "mean_step_ms")),
                _number(ratio, ".2f", "×"),
                _number(100 * accuracy, ".1f", " %") if isinstance(accuracy, int | float) else "–",
                *(f"{named.run.most_by_a_rank(name):.2f}" for name in ("moved", "lent", "pruned")),
            ]
        )
    return rows


def compared_with(runs: Sequence[NamedRun]) -> str:
    """A sentence that says what the speed-ups mean."""
    references = {one.name for run in runs for one in references_of(runs, run)}
    if not references:
        return "No speed-up is told: no run in mode off has the same stragglers and the same settings."
    names = ", ".join(one.name for one in runs if one.name in references)
    return (
        f"Speed-up: the median step of {names}{', mean of several,' if len(references) > 1 else ''} over the run's. "
        "What else the machine did meanwhile is in both."
    )


def _settings(named: NamedRun, *, with_stragglers: bool) -> str:
    """What a step takes its time by, but for balancing; runs whose settings are not told are like each other."""
    left_out = (*_SECTIONS_MAY_DIFFER, *(() if with_stragglers else ("straggler",)))
    settings = {
        name: _without(section_of(named.run.config, name), name) or value
        for name, value in named.run.config.items()
        if name not in left_out and name not in _MAY_DIFFER
    }
    return repr((sorted(settings.items(), key=str), named.run.summary.get("ranks", len(named.run.records))))


def _without(section: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    return sorted((key, value) for key, value in section.items() if f"{name}.{key}" not in _MAY_DIFFER)


def _is_like(run: NamedRun, other: NamedRun, *, with_stragglers: bool) -> bool:
    return _settings(run, with_stragglers=with_stragglers) == _settings(other, with_stragglers=with_stragglers)


def _seed(named: NamedRun) -> Any:
    return section_of(named.run.config, "training").get("seed")


def _number(value: float, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if value == value else "–"
