"""Lines for an operator: who has become slow, slower, or as fast as the others again."""

from __future__ import annotations

from collections.abc import Sequence

from zeroresize.policy.slowness.group_slowness import SlownessEvent, SlowRank
from zeroresize.policy.slowness.windows import Cause
from zeroresize.utils.texts import percent_text, seconds_text

_TEXTS: dict[Cause, str] = {
    "products": "its matrix products take longer",
    "rest": "what it computes besides matrix products takes longer",
    "loader": "it comes late to the model, as from a slow data loader",
    "compute": "what it computes takes longer",
}


def lines_of(events: Sequence[SlownessEvent], share_saved: float, *, compares_work: bool) -> list[str]:
    """Return a line for each event of an update, or one for many of a kind.

    A division of work by speed would save ``share_saved`` of a step at most. Unless times are for as much work,
    ``compares_work``, a rank may just have more.
    """
    lines = []
    for kind in ("begins", "changes", "ends"):
        alike = [event for event in events if event.kind == kind]
        if len(alike) > 2:  # a line tells how many they are
            lines.append(_of_many(alike, compares_work))
        else:
            lines += [_of_event(event, share_saved, compares_work) for event in alike]
    return lines


def _of_event(event: SlownessEvent, share_saved: float, compares_work: bool) -> str:
    slow = event.slow
    if event.kind == "ends":
        return (
            f"rank {slow.rank} is as fast as the others again: it was {event.times_before:.2f} times slower, from step "
            f"{slow.since_step} on for {slow.num_steps} steps ({seconds_text(slow.seconds)}), which cost "
            f"{seconds_text(slow.cost_s)}"
        )
    now = f"{slow.times:.2f} times slower than the others"
    if event.kind == "changes":
        now += f" now, {event.times_before:.2f} times before"
    brings = f"; work divided by speed would make steps {percent_text(share_saved)} shorter at most"
    return (
        f"rank {slow.rank} is {now}, slow since step {slow.since_step} ({seconds_text(slow.seconds)}): "
        f"{_why(slow, compares_work)}; that has cost {seconds_text(slow.cost_s)} so far"
        + (brings if slow.cause != "loader" else "")
    )


def _of_many(events: Sequence[SlownessEvent], compares_work: bool) -> str:
    most = max(events, key=lambda event: max(event.slow.times, event.times_before))
    if events[0].kind == "ends":
        return f"{len(events)} ranks are as fast as the others again, rank {most.slow.rank} among them"
    changed = " have become faster or slower, and" if events[0].kind == "changes" else ""
    return (
        f"{len(events)} ranks{changed} are slower than the others, rank {most.slow.rank} most, "
        f"{most.slow.times:.2f} times: {_why(most.slow, compares_work)}"
    )


def _why(slow: SlowRank, compares_work: bool) -> str:
    more_work = "" if compares_work or slow.cause == "loader" else ", or it has more work"
    return _TEXTS[slow.cause] + more_work
