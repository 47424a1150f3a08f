"""Lines for an operator: who has become slow, slower, or as fast again, why, what it costs, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zeroresize.policy.slowness.group_slowness import (
    Event,
    PastEvent,
    PastSlowness,
    SlownessEvent,
    SlowRank,
    WatchReport,
)
from zeroresize.status import LEAST_WAIT
from zeroresize.utils.texts import TEXTS_OF_CAUSES, duration_text, named_ranks, percent_text

#: With the number of the step before it a line has 200 characters at most.
_MOST_CHARACTERS = 186
#: A GPU whose clock is lower than the others' by a smaller share is as fast as they are.
_LEAST_CLOCK = 0.05
_MOST_NODES = 3


def lines_of(events: Sequence[Event], report: WatchReport, *, compares_work: bool) -> list[str]:
    """Return a line for each event of an update, or one for many of a kind.

    Unless times are for as much work, ``compares_work``, a rank may just have more.
    """
    lines = []
    for kind in ("begins", "changes", "ends"):
        alike = [event for event in events if isinstance(event, SlownessEvent) and event.kind == kind]
        if len(alike) > 2:  # a line tells how many they are
            lines.append(_of_many(alike, report, compares_work))
        else:
            lines += [_of_event(event, report, compares_work) for event in alike]
    return lines + [_of_past(event, report, compares_work) for event in events if isinstance(event, PastEvent)]


def _of_event(event: SlownessEvent, report: WatchReport, compares_work: bool) -> str:
    slow = event.slow
    if event.kind == "ends":
        return (
            f"rank {slow.rank} is as fast as the others again: it was {event.times_before:.2f} times slower, from step "
            f"{slow.since_step} on for {slow.num_steps} steps ({duration_text(slow.seconds)}), which cost "
            f"{duration_text(slow.cost_s)}"
        )
    now = f" now, {event.times_before:.2f} times before" if event.kind == "changes" else ""
    why, next_step = _why(slow, report, compares_work)
    return _joined(
        f"rank {slow.rank} is {slow.times:.2f} times slower than the others{now}, since step {slow.since_step}: {why}",
        next_step,
        f"cost {duration_text(slow.cost_s)}",
        _longest_wait(slow.rank, report),
        "" if slow.cause == "loader" else f"work by speed: {percent_text(report.share_saved)} shorter steps at most",
    )


def _of_many(events: Sequence[SlownessEvent], report: WatchReport, compares_work: bool) -> str:
    most = max(events, key=lambda event: max(event.slow.times, event.times_before))
    if events[0].kind == "ends":
        return f"{len(events)} ranks are as fast as the others again, rank {most.slow.rank} among them"
    changed = " have become faster or slower, and" if events[0].kind == "changes" else ""
    why, next_step = _why(most.slow, report, compares_work)
    return _joined(
        f"{len(events)} ranks{changed} are slower than the others, rank {most.slow.rank} most, "
        f"{most.slow.times:.2f} times: {why}",
        next_step,
    )


def _of_past(event: PastEvent, report: WatchReport, compares_work: bool) -> str:
    slow = event.slow
    if event.kind == "ends":
        return (
            f"{_who(slow, report)} are as fast as until step {slow.since_step} again: they took "
            f"{event.times_before:.2f} times as long for {slow.num_steps} steps"
        )
    before = f"it was {event.times_before:.2f} times before" if event.kind == "changes" else ""
    may_have_more = "" if compares_work or slow.place else ", or they have more work"
    next_step = TEXTS_OF_CAUSES[slow.cause].next_step.format(node=_nodes(slow.ranks, report))
    return _joined(past_line(slow, report) + may_have_more, before, next_step)


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


def _why(slow: SlowRank, report: WatchReport, compares_work: bool) -> tuple[str, str]:
    """Return why a rank is slow, and what to do next."""
    texts, gpu = TEXTS_OF_CAUSES[slow.cause], report.gpus[slow.rank] if report.gpus else None
    node, state = _nodes([slow.rank], report), ""
    if gpu is not None and slow.cause != "loader":
        if gpu.throttled and any(each is None or each.throttled != gpu.throttled for each in report.gpus):
            of_gpu = TEXTS_OF_CAUSES[gpu.throttled]
            return of_gpu.sentence.format(celsius=gpu.celsius), of_gpu.next_step.format(node=node)
        clocks = [each.clock for each in report.gpus if each is not None]
        if gpu.clock < (1.0 - _LEAST_CLOCK) * max(clocks):
            state = f", its GPU at {percent_text(gpu.clock)} of its clock"
    more_work = "" if compares_work or slow.cause == "loader" else ", or it has more work"
    return texts.sentence + state + more_work, texts.next_step.format(node=node)


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
