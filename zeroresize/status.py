"""Status: who is slow, how work is divided, what that saves, and why; one object for all that balances or watches."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from zeroresize.utils.files import without_nan
from zeroresize.utils.texts import CAUSES, duration_text, percent_text

_StateT = TypeVar("_StateT", "RankStatus", "Status")

#: What is divided over ranks; a watch, and a balancer that is off, divide nothing.
Kind = Literal["units", "layers", "strategies", "micro-batches", "samples", "nothing"]
#: A wait for a smaller share of a step explains nothing.
LEAST_WAIT = 0.05
HEADINGS = ("rank", "busy", "speed", "share", "slow since", "because of", "cost", "past", "waits for")


@dataclass(frozen=True)
class RankStatus:
    """Describe a rank of a group, as it was seen last.

    Attributes:
        rank: within the group.
        busy_s: usual seconds of a step without waits for others, at an even share of the work.
        speed: the fastest rank's ``busy_s`` as a share of this one's: 1 is as fast as the fastest, 0.5 half as fast.
        share: what it computes, as a multiple of an even share.
        slow_since: after so many steps it became slow; None where it is not.
        cause: what most of its delay comes from, as :class:`~zeroresize.policy.slowness.group_slowness.SlowRank` says;
            empty where it is not slow, or that is not known.
        cost_s: seconds that others have waited for it since, or would have at even shares.
        past_score: what it took before as a share of what it takes now: 1 is as fast as ever; NaN if that is not known.
        node: where it runs; empty if that is not known.
        waits_s: usual seconds of a step by where it waits most, such as "collectives of group dp".
    """

    rank: int
    busy_s: float
    speed: float
    share: float = 1.0
    slow_since: int | None = None
    cause: str = ""
    cost_s: float = 0.0
    past_score: float = math.nan
    node: str = ""
    waits_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Status:
    """Describe what a balancer or a watch knows, and has decided; the same on every rank of its group.

    ``print`` shows it as a table, and so does a notebook. Numbers that are not known yet are NaN.

    Attributes:
        kind: what is divided: "units" (neurons and heads), "layers" (of a pipeline), "strategies", "micro-batches",
            "samples", or "nothing".
        state: "on", "advice" or "off" while balancing is paused so, and "ended" once it was closed.
        step: how many steps were over.
        time: when this was, in seconds since 1970, by the clock of the rank that tells.
        step_s: usual seconds of a step, as they were measured.
        expected_step_s: of a step as work is divided now, by the speeds of ranks.
        even_step_s: the same as the host divides work.
        saved_s: seconds that dividing otherwise has saved so far by these two, less those of moves.
        cost_s: seconds that slow ranks have cost the group so far, or would have at even shares.
        ranks: [R], each rank; empty before all were measured.
        decided: what was decided last, and why; of a watch, what slows most ranks alike; empty before anything was.
    """

    kind: Kind
    state: str
    step: int
    time: float
    step_s: float
    expected_step_s: float
    even_step_s: float
    saved_s: float
    cost_s: float
    ranks: tuple[RankStatus, ...]
    decided: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, None for NaN, as JSON has no such numbers."""
        return without_nan(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Status:
        """Return the status of which :meth:`to_dict` made ``values``; a line of telemetry is such.

        Raises:
            ValueError: naming what lacks, where it is another record.
        """
        ranks = tuple(_restored(RankStatus, rank) for rank in values.get("ranks", ()))
        return dataclasses.replace(_restored(cls, values), ranks=ranks)

    def scalars(self) -> dict[str, float]:
        """Return numbers by name, under ``status/``, those of ranks under ``status/rank 0/`` and so on."""
        names = ("step_s", "expected_step_s", "even_step_s", "saved_s", "cost_s")
        of_group = {name: getattr(self, name) for name in names}
        of_ranks = {
            f"rank {rank.rank}/{name}": getattr(rank, name)
            for rank in self.ranks
            for name in ("busy_s", "speed", "share", "cost_s", "past_score")
        }
        return {f"status/{name}": value for name, value in {**of_group, **of_ranks}.items()}

    @property
    def headline(self) -> str:
        """The group in one line."""
        parts = [f"step {self.step}", "watched" if self.kind == "nothing" else f"{self.kind} are divided"]
        if self.state != "on":
            parts[-1] += f" ({self.state})"
        if not math.isnan(self.step_s):
            parts.append(f"{duration_text(self.step_s)} a step")
        shorter = 1.0 - self.expected_step_s / self.even_step_s
        if not math.isnan(shorter):
            parts.append(f"{percent_text(shorter)} shorter than evenly" if shorter >= 0.005 else "as long as evenly")
        if not math.isnan(self.saved_s):
            parts.append(f"saved {duration_text(self.saved_s)} so far")
        if self.cost_s > 0.0:
            would = "have" if self.kind == "nothing" else "would have"
            parts.append(f"slow ranks {would} cost {duration_text(self.cost_s)}")
        return "; ".join(parts)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """A row of texts for each rank, as :data:`HEADINGS` names them."""
        return [
            (
                str(each.rank),
                duration_text(each.busy_s),
                _known(each.speed),
                _known(each.share),
                "" if each.slow_since is None else f"step {each.slow_since}",
                CAUSES.get(each.cause, each.cause),
                "" if each.slow_since is None else duration_text(each.cost_s),
                _known(each.past_score),
                self._longest_wait(each),
            )
            for each in self.ranks
        ]

    def _longest_wait(self, rank: RankStatus) -> str:
        place = max(rank.waits_s, key=lambda place: rank.waits_s[place], default="")
        share = rank.waits_s.get(place, 0.0) / self.step_s
        return f"{place}, {percent_text(share)} of a step" if share >= LEAST_WAIT else ""

    def __str__(self) -> str:
        rows = [HEADINGS, *self.rows] if self.ranks else []
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([self.headline, *lines, *([self.decided] if self.decided else [])])

    def _repr_html_(self) -> str:
        def row(texts: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"

        table = "".join([row(HEADINGS, "th"), *(row(texts, "td") for texts in self.rows)])
        return f"<p>{html.escape(self.headline)}</p><table>{table}</table><p>{html.escape(self.decided)}</p>"


def _known(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def ranks_by_speed(
    speeds: Sequence[float], shares: Sequence[float], busy_s: float = math.nan
) -> tuple[RankStatus, ...]:
    """Return [R] ranks of these speeds [R], in any unit, that compute these shares [R].

    Args:
        busy_s: seconds of the fastest at an even share.
    """
    fastest = max(speeds, default=math.nan)
    return tuple(
        RankStatus(rank, busy_s * fastest / speed, speed / fastest, share)
        for rank, (speed, share) in enumerate(zip(speeds, shares, strict=True))
    )


def _restored(cls: type[_StateT], values: Mapping[str, Any]) -> _StateT:
    known = dataclasses.fields(cls)
    needed = [each.name for each in known if each.default is each.default_factory]  # both are missing
    lacking = [name for name in needed if name not in values]
    if lacking:
        raise ValueError(f"no {cls.__name__} is here: {', '.join(lacking)} lack in {list(values)}")
    numbers = {each.name: math.nan for each in known if each.type == "float" and values.get(each.name, 0.0) is None}
    return cls(**{each.name: values[each.name] for each in known if each.name in values} | numbers)
