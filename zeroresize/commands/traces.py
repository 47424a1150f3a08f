"""Reads torch.profiler's Chrome traces, one of each rank: what a step's seconds went to, and who waited in collectives.

Clocks of ranks differ, so no times of two are compared, but lengths: what a rank waited in a collective is its length
less the shortest of the same one on any rank; of sends and receives, less the shortest of their kind.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroresize.commands.errors import CommandError
from zeroresize.policy.slowness.windows import WatchedStep
from zeroresize.utils.texts import named_ranks

Span = tuple[float, float]
Event = dict[str, Any]

_STEP = re.compile(r"ProfilerStep#(\d+)$")
_PRODUCT = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|mv|addmv|_?(scaled|int|grouped)_mm|_?convolution(_backward)?|_scaled_dot_product\w+)$"
    r"|(?!aten::).*(gemm|gemv|cutlass|xmma|nvjet|convolve|cudnn|wgrad|dgrad|flash|fmha|Cijk_)"
)
#: Ops that start a collective or wait for it.
_COLLECTIVE_OPS = ("c10d::", "_c10d_functional::", "record_param_comms")
_DATA_PARALLEL = ("DistributedDataParallel.", "FullyShardedDataParallel.", "FSDP::")


@dataclass(frozen=True)
class Job:
    """Hold what is known of a group: of R ranks in S steps, seconds of each, and what cannot be known."""

    name: str
    ranks: list[int]
    numbers: list[int]  # [S] of the steps
    steps: list[list[WatchedStep]]  # [R][S]
    notes: list[str]
    kind: str = ""  # what is divided, as in a Status; empty where that is not known
    waits: dict[tuple[str, str], dict[int, float]] | None = None  # by group and collective, and rank; a status has none
    causes: dict[int, str] = field(default_factory=dict)  # of ranks, where the job has said them
    saved_s: float = 0.0  # by balancing, so far


class RankTrace:
    """What a trace tells of its rank, in seconds of its clock: spans of steps by number, of collectives by kind."""

    def __init__(self, content: Any) -> None:
        header = content.get("distributedInfo", {})
        self.rank, self.num_ranks = int(header.get("rank", -1)), int(header.get("world_size", 0))
        groups = [group.get("pg_desc", "?") for group in header.get("pg_config", ()) if group.get("pg_size") != 1]
        events: list[Event] = [event for event in content["traceEvents"] if event["ph"] in "Xs" and "cat" in event]
        complete = [event for event in events if event["ph"] == "X" and event["cat"] != "Trace"]
        kernels = [event for event in complete if event["cat"] == "kernel"]
        if not complete:
            raise ValueError("the profiler has recorded nothing, as its schedule says")
        places = ("gpu_user_annotation", "user_annotation")[not kernels :]
        self.steps = next(filter(None, (_marked_steps(complete, place) for place in places)), {})
        self.are_marked = bool(self.steps)
        if kernels and len(self.steps) > 1:  # when the device began to wait for the first batch nobody knows
            del self.steps[min(self.steps)]
        if not self.are_marked:
            spans = [_span(event) for event in complete]
            self.steps = {0: (min(begin for begin, _ in spans), max(end for _, end in spans))}
        prefix = "nccl" if kernels else "gloo:"
        sent = [event for event in kernels or complete if event["name"].startswith(prefix)]
        self.collectives: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for event in sorted(sent, key=_span):
            self.collectives[_group_and_kind(event, groups)].append(_span(event))
        computing = [event for event in kernels if not event["name"].startswith(prefix)] or _computing_ops(complete)
        forwards = computing if kernels else [event for event in events if event["cat"] == "fwdbwd"]
        products = [event for event in computing if _PRODUCT.match(event["name"])]
        self._forwards = sorted(_span(event)[0] for event in forwards or products)
        self._computing, self._products = _joined(computing), _joined(products)
        self._occupied = _joined([*computing, *sent])
        self.is_data_parallel = any(event["name"].startswith(_DATA_PARALLEL) for event in complete)

    def step(self, number: int) -> WatchedStep:
        """Return what a step's seconds went to; what a collective takes beside computing is no wait."""
        begin, end = self.steps[number]
        first = next((time for time in self._forwards if begin <= time < end), begin)
        wait_s, early_s = self._waited_s(begin, end), self._waited_s(begin, first)
        products_s = _lasting(self._products, begin, end) or math.nan
        return WatchedStep(end - begin - wait_s, wait_s, first - begin - early_s, products_s)

    def lengths(self, key: tuple[str, str], number: int) -> list[float]:
        """Return how long collectives that began in a step took, in order."""
        begin, end = self.steps[number]
        return [last - first for first, last in self.collectives.get(key, ()) if begin <= first < end]

    def _waited_s(self, begin: float, end: float) -> float:
        return _lasting(self._occupied, begin, end) - _lasting(self._computing, begin, end)


def job_of(paths: Sequence[Path]) -> Job:
    """Return what the traces of a job's ranks tell together.

    Raises:
        CommandError: naming a file that is no trace, two of a rank, or traces without a step in common.
    """
    of_rank: dict[int, RankTrace] = {}
    for path in paths:
        trace = _read(path)
        rank = len(of_rank) if trace.rank < 0 else trace.rank
        if rank in of_rank:
            raise CommandError(f"{path}: a second trace of rank {rank}; give one of each rank")
        of_rank[rank] = trace
    ranks, traces = sorted(of_rank), list(of_rank.values())
    numbers = sorted(set.intersection(*(set(trace.steps) for trace in traces)))
    if not numbers:
        raise CommandError(f"{', '.join(map(str, paths))}: no step is in all of these traces; profile the same steps")
    world = max(trace.num_ranks for trace in traces)
    keys = {key for trace in traces for key in trace.collectives}
    notes = {
        f"of {world} ranks there are traces of {named_ranks(ranks)} alone: waits may be longer": len(ranks) < world,
        "traces do not say of which rank they are: counted as given": any(trace.rank < 0 for trace in traces),
        "no steps are marked, as by profiler.step(): the whole trace is one": not all(
            each.are_marked for each in traces
        ),
        "only steps that are in every trace count": any(len(trace.steps) > len(numbers) for trace in traces),
        "no collectives are in the traces (of NCCL they are kernels: profile ProfilerActivity.CUDA)": not keys,
        "gloo's events do not say of which group they are: all groups count together": any(
            group == "?" for group, _ in keys
        ),
    }
    return Job(
        name=", ".join(map(str, paths[:2])) + (", …" if len(paths) > 2 else ""),
        ranks=ranks,
        numbers=numbers,
        steps=[[of_rank[rank].step(number) for number in numbers] for rank in ranks],
        notes=[note for note, holds in notes.items() if holds],
        kind="samples" if any(trace.is_data_parallel for trace in traces) else "",
        waits={key: _waits(key, of_rank, numbers) for key in sorted(keys)},
    )


def _waits(key: tuple[str, str], of_rank: dict[int, RankTrace], numbers: Sequence[int]) -> dict[int, float]:
    """Seconds for which each rank waited in collectives of a kind; calls are matched in order within a step."""
    members = [rank for rank, trace in of_rank.items() if key in trace.collectives]
    shortest_s = min(end - begin for rank in members for begin, end in of_rank[rank].collectives[key])
    waits_s = dict.fromkeys(members, 0.0)
    for number in numbers:
        lengths = [of_rank[rank].lengths(key, number) for rank in members]
        are_matched = len(set(map(len, lengths))) == 1 and not re.search("send|recv", key[1], re.IGNORECASE)
        for rank, of_calls in zip(members, lengths, strict=True):
            least_s = map(min, zip(*lengths, strict=True)) if are_matched else [shortest_s] * len(of_calls)
            waits_s[rank] += math.fsum(of_calls) - math.fsum(least_s)
    return waits_s


def is_trace(path: Path) -> bool:
    """Whether a file begins as a trace does, and not as other JSON that lies in a run's folder."""
    with path.open("rb") as file:
        head = file.read(2**16)
    return path.suffix == ".gz" or b'"schemaVersion"' in head or b'"traceEvents"' in head


def _read(path: Path) -> RankTrace:
    try:
        raw = path.read_bytes()
        return RankTrace(json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise CommandError(f"{path}: no trace of steps, or a damaged one: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise CommandError(f"{path}: no trace: profiler.export_chrome_trace(path) writes such") from error


def _span(event: Event) -> Span:
    return 1e-6 * event["ts"], 1e-6 * (event["ts"] + event.get("dur", 0.0))


def _marked_steps(events: Iterable[Event], category: str) -> dict[int, Span]:
    """Steps by number, each from the end of the one before: a device has nothing to do while a batch is fetched."""
    steps: dict[int, Span] = {}
    for event in events:
        if event["cat"] == category and (mark := _STEP.match(event["name"])):
            begin, end = _span(event)
            known = steps.get(int(mark[1]), (begin, end))  # each stream has a mark
            steps[int(mark[1])] = min(begin, known[0]), max(end, known[1])
    return {number: (steps.get(number - 1, span[:1])[-1], span[1]) for number, span in steps.items()}


def _group_and_kind(event: Event, groups: Sequence[str]) -> tuple[str, str]:
    if event["name"].startswith("gloo:"):
        return groups[0] if len(groups) == 1 else "?", event["name"].removeprefix("gloo:")
    known = event.get("args", {})
    name = known.get("Process Group Description") or known.get("Process Group Name", "")
    kernel = re.match(r"nccl(?:Dev)?Kernel_?([A-Za-z]+)", event["name"])
    kind = known.get("Collective name") or (kernel[1] if kernel else event["name"])
    return f"{name} {known.get('Process Group Ranks', '')}".strip(), kind


def _computing_ops(events: Sequence[Event]) -> list[Event]:
    """Ops in which no collective begins or is waited for."""
    ops = [event for event in events if event["cat"] == "cpu_op"]
    begins = sorted(_span(op)[0] for op in ops if op["name"].startswith(_COLLECTIVE_OPS))
    return [op for op in ops if len({bisect_left(begins, time) for time in _span(op)}) == 1]


def _joined(events: Iterable[Event]) -> list[Span]:
    """Spans of events in order, those that overlap as one."""
    joined: list[Span] = []
    for begin, end in sorted(map(_span, events)):
        if joined and begin <= joined[-1][1]:
            begin, end = joined[-1][0], max(end, joined.pop()[1])
        joined.append((begin, end))
    return joined


def _lasting(joined: Sequence[Span], begin: float, end: float) -> float:
    """How long joined spans last between two times."""
    first = max(bisect_left(joined, (begin,)) - 1, 0)
    within = joined[first : bisect_left(joined, (end,))]
    return math.fsum(max(min(until, end) - max(since, begin), 0.0) for since, until in within)
