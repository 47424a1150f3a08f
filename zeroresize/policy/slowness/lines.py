"""Lines for an operator: who has become slow, slower, or as fast again, why, what it costs, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zeroresize.policy.slowness.group_slowness import PastSlowness, SlownessEvent, SlowRank, WatchReport
from zeroresize.policy.speed.noise import USUAL_NOISE
from zeroresize.status import LEAST_WAIT
from zeroresize.utils.texts import TEXTS_OF_CAUSES, duration_text, named_ranks, percent_text

#: With the number of the step before it a line has 200 characters at most.
_MOST_CHARACTERS = 185
_MOST_NODES = 2


def lines_of(events: Sequence[SlownessEvent], report: WatchReport, *, compares_work: bool) -> list[str]:
    """Return a line for each event of an update, or one for many of a kind.

    Unless times are for as much work, ``compares_work``, a rank may just have more.
    """
    kinds: dict[tuple[type, str], list[SlownessEvent]] = {}
    for event in events:
        kinds.setdefault((type(event.slow), event.kind), []).append(event)
    lines = []
    for alike in kinds.values():
        most = max(alike, key=lambda event: max(event.slow.times, event.times_before))
        # A line tells how many they are.
        more = f"and {len(alike) - 1} others alike" if len(alike) > 2 else ""
        lines += [_line(event, more, report, compares_work) for event in ([most] if more else alike)]
    return lines


def _line(event: SlownessEvent, more: str, report: WatchReport, compares_work: bool) -> str:
    slow, before = event.slow, f"{event.times_before:.2f} times"
    more_work = "" if compares_work or slow.cause in ("loader", "link") else ", or {} more work"
    if isinstance(slow, PastSlowness):
        again = f"{_who(slow, report)} are as fast as until step {slow.since_step} again: they took {before} as long "
        if event.kind == "ends":
            return _joined(f"{again}for {slow.num_steps} steps", more)
        changed = f"it was {before} before" if event.kind == "changes" else ""
        next_step = TEXTS_OF_CAUSES[slow.cause].next_step.format(node=_nodes(slow.ranks, report))
        return _joined(past_line(slow, report) + more_work.format("they have"), changed, more, next_step)
    if event.kind == "ends":
        since = f"from step {slow.since_step} on for {slow.num_steps} steps ({duration_text(slow.seconds)})"
        line = f"rank {slow.rank} is as fast as the others again: it was {before} slower, {since}, which cost"
        return _joined(f"{line} {duration_text(slow.cost_s)}", more)
    changed = f" now, {before} before" if event.kind == "changes" else ""
    why, next_step = _why(slow, report)
    return _joined(
        f"rank {slow.rank} is {slow.times:.2f} times slower than the others{changed}, since step {slow.since_step}: "
        + why
        + more_work.format("it has"),
        more,
        next_step,
        f"cost {duration_text(slow.cost_s)}",
        _longest_wait(slow.rank, report),
        "" if slow.cause == "loader" else f"work by speed: {percent_text(report.share_saved)} shorter steps at most",
    )


def past_line(slow: PastSlowness, report: WatchReport) -> str:
    """Return who takes longer than before, since when, by how much and why."""
    why = f"mostly {TEXTS_OF_CAUSES[slow.cause].name}"
    if slow.place:
        why = f"{named_ranks(slow.ranks)} {'wait' if len(slow.ranks) > 1 else 'waits'} longer for {slow.place}"
    return f"{_who(slow, report)} take {slow.times:.2f} times as long as until step {slow.since_step}: {why}"


def _who(slow: PastSlowness, report: WatchReport) -> str:
    if slow.place:
        return "steps"
    are_all = len(slow.ranks) == report.num_ranks
    return f"{'all' if are_all else f'{len(slow.ranks)} of'} {report.num_ranks} ranks"


def _joined(line: str, *further: str) -> str:
    """Return a line with those further parts that it has room for, the first ones first."""
    for part in filter(None, further):
        longer = f"{line}; {part}"
        line = longer if len(longer) <= _MOST_CHARACTERS else line
    return line


def _why(slow: SlowRank, report: WatchReport) -> tuple[str, str]:
    """Return why a rank is slow, and what to do next; a GPU matters whose clock is lower than others'."""
    texts, gpu = TEXTS_OF_CAUSES[slow.cause], report.gpus[slow.rank] if report.gpus else None
    node, clocks = _nodes([slow.rank], report), [1.0 if each is None else each.clock for each in report.gpus]
    state = ""
    if gpu is not None and slow.cause != "loader" and gpu.clock < (1.0 - USUAL_NOISE) * max(clocks):
        if gpu.throttled and any(each is None or each.throttled != gpu.throttled for each in report.gpus):
            of_gpu = TEXTS_OF_CAUSES[gpu.throttled]
            return of_gpu.sentence.format(celsius=gpu.celsius), of_gpu.next_step.format(node=node)
        state = f", its GPU at {percent_text(gpu.clock)} of its clock"
    return texts.sentence + state, texts.next_step.format(node=node)


def _nodes(ranks: Iterable[int], report: WatchReport) -> str:
    names = list(dict.fromkeys(report.nodes[rank] for rank in ranks)) if report.nodes else []
    if not names:
        return "its node"
    return ", ".join(names[:_MOST_NODES]) + (", …" if len(names) > _MOST_NODES else "")


def _longest_wait(late: int, report: WatchReport) -> str:
    """Tell where another rank waits most, as a share of a step."""
    waits = [(s, rank, place) for rank, each in enumerate(report.waits_s) for place, s in each.items() if rank != late]
    seconds, rank, place = max(waits, default=(0.0, 0, ""))
    share = seconds / report.step_s
    return f"rank {rank} waits {percent_text(share)} for {place}" if share >= LEAST_WAIT else ""
