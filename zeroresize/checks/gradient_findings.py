"""Names what is wrong with gradients: the cause, and where it begins, not all that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeroresize.checks.finding import DERIVATIVE, GRADIENTS, MULTIPLIED, PARTIAL, UNREAD, ParallelFinding, finding
from zeroresize.checks.gradient_checks import JudgedGradient
from zeroresize.checks.recording import Event, Recorder, are_alike
from zeroresize.resharding.ranks import Ranks

_MOST_NAMED = 4


def find_wrong_gradients(
    judged: Sequence[JudgedGradient], events: Sequence[Event], recorder: Recorder, ranks: Ranks, tolerance: float
) -> list[ParallelFinding]:
    """Return findings for what :meth:`GradientCheck.run` has judged; collective.

    Whatever stands before a wrong gradient in the forward has another one, too: named is what comes last.
    """
    calls: dict[str, int] = {}
    for at, event in enumerate(events):
        calls.setdefault(event.module, at)
    judged = sorted(judged, key=lambda one: calls.get(one.part.name.rpartition(".")[0], -1))
    findings: list[ParallelFinding] = []
    multiplied: list[JudgedGradient] = []
    differing: list[JudgedGradient] = []
    others: list[JudgedGradient] = []
    for each in judged:
        name = each.part.name
        if not each.has_gradient:
            if each.is_measured(0.0) and not _is_idle_expert(name, calls):
                findings.append(
                    finding(UNREAD, "no gradient reaches it, and the loss is the same without it", parameter=name)
                )
            elif not each.is_measured(0.0):
                what = f"no gradient reaches it, and the loss changes with it ({each.measured:.3g})"
                findings.append(finding(PARTIAL, what, parameter=name, operation="backward"))
        elif not each.is_alike:
            if each.is_measured(each.total):
                what = f"only the sum of the ranks' gradients is the measured derivative: {_figures(each)}"
                findings.append(finding(PARTIAL, what, parameter=name, operation="all-reduce of the gradient"))
            else:
                differing.append(each)
        elif not each.is_measured(each.gradient):
            (multiplied if _times(each, ranks.size) else others).append(each)
    if differing:
        layer, operation = _where_gradients_part(recorder, ranks, tolerance)
        findings.append(_first_of(GRADIENTS, differing, "nor is their sum", operation, layer))
    if multiplied:
        measurable = [one for one in judged if abs(one.measured) > 10.0 * one.noise]
        is_loss = len(measurable) > 1 and {_times(one, ranks.size) for one in measurable} == {
            _times(multiplied[0], ranks.size)
        }
        times = f"it is {_times(multiplied[-1], ranks.size):g} times the measured derivative"
        if is_loss:
            findings.append(finding(MULTIPLIED, f"{times}, in all parameters", operation=recorder.loss))
        else:
            findings.append(_first_of(MULTIPLIED, multiplied, times, "backward"))
    elif others and not differing and not findings:
        findings.append(_first_of(DERIVATIVE, others, "alike on all ranks, and other than measured", "backward"))
    return findings


def _first_of(
    cause: str, judged: Sequence[JudgedGradient], what: str, operation: str, layer: str | None = None
) -> ParallelFinding:
    """The finding of what comes last in the forward, hence first in the backward."""
    *before, last = judged
    names = [one.part.name for one in before[::-1]]
    more = f"; so is that of {', '.join(names[:_MOST_NAMED])}{', …' if names[_MOST_NAMED:] else ''}" if names else ""
    return finding(cause, f"{what}: {_figures(last)}{more}", parameter=last.part.name, operation=operation, layer=layer)


def _where_gradients_part(recorder: Recorder, ranks: Ranks, tolerance: float) -> tuple[str | None, str]:
    """Return the layer that comes last of those at which alike activations have differing gradients."""
    tables: list[Mapping[str, list[list[list[float]]]]] = ranks.share(recorder.gradients)
    for key in reversed(list(tables[0])):
        rows = [table[key] for table in tables if key in table]
        values, gradients = [row[0] for row in rows], [row[1] for row in rows]
        is_alike = all(are_alike(each, values[0], tolerance) for each in values)
        is_known = is_alike and len(rows) == len(tables) and all(gradients)
        if is_known and not all(are_alike(each, gradients[0], tolerance) for each in gradients):
            layer, _, side = key.rpartition(" ")
            return layer, "all-reduce of dx" if side == "input" else "backward"
    return None, "backward"


def _times(judged: JudgedGradient, num_ranks: int) -> float:
    """Return which multiple of the measured derivative the gradient is, a power of the ranks' number; else 0."""
    multiples = [float(num_ranks) ** power for power in (1, 2, -1, -2)]
    if abs(judged.measured) <= 10.0 * judged.noise:
        return 0.0
    return next((times for times in multiples if judged.is_measured(judged.gradient / times)), 0.0)


def _figures(judged: JudgedGradient) -> str:
    ranks = ", ".join(f"{product:.4g}" for product in judged.products[:_MOST_NAMED])
    of_ranks = "the ranks' shards" if judged.part.is_shard else "the ranks"
    return f"in one direction {ranks} on {of_ranks}, and {judged.measured:.4g} by differences of the loss"


def _is_idle_expert(name: str, calls: Mapping[str, int]) -> bool:
    """Whether an item of a list that holds it was not called, and another was, as where tokens choose experts."""
    path = name.split(".")
    items = [(".".join(path[:at]), ".".join(path[: at + 1])) for at, word in enumerate(path) if word.isdigit()]
    return any(
        item not in calls and any(called.rpartition(".")[0] == holder for called in calls) for holder, item in items
    )
