"""Ranks of a group agree before anything moves, and tell each other when one of them cannot."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import (
    Channel,
    Waitable,
    group_rank,
    group_ranks,
    group_size,
    message_device,
    require_group,
    start_messages,
)
from zeroresize.comm.exchange import Meet, meet_by
from zeroresize.utils.deadline import within
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.texts import alike, at_fault, by_rank, size_text
from zeroresize.utils.torch_state import is_out_of_memory, reason

_T = TypeVar("_T")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
#: What is left free of the memory that is free.
_MARGIN = 0.05
#: The tag of meets over a channel: they never take a message of the move that is under way there.
_MET_ASIDE = 1
#: How long a rank that has failed waits at least for the others to hear of it.
_LEAST_WAIT = timedelta(seconds=1)
_NOTHING_CHANGED = "nothing has moved or changed"
#: What a rank meets with that has failed before, and where its memory ran out; behind it, why.
_FAILED, _RAN_OUT = -1.0, -2.0
#: What a rank could not prepare that was given what is not allowed.
ARGUMENTS = "its arguments"
#: Bytes at most of what a rank tells the others of its error.
_MOST_TOLD = 1000


class CannotMoveError(RuntimeError):
    """Tells that something cannot move, on this rank or another; nothing has changed on any rank."""


class NotEnoughMemoryError(RuntimeError):
    """Tells that something does not fit into the memory of some ranks; nothing has changed on any rank."""


@dataclass(frozen=True)
class MeetReplicas:
    """Exchanges numbers (a :data:`Meet`) in a group and its data-parallel replicas: none of them may move alone.

    Attributes:
        meet: of all their ranks, replica by replica.
        ranks: theirs, counted over the whole world, with which errors name them.
    """

    meet: Meet
    ranks: Sequence[int]

    def __call__(self, *numbers: float) -> Sequence[Sequence[float]]:
        return self.meet(*numbers)


def meet_over(process_group: ProcessGroup, device: torch.device, over: Channel | None = None) -> Meet:
    """Return a :data:`Meet` of the group, from ``device`` where it sends from there; or ``over`` a channel of it."""
    where = message_device(process_group, device) if over is None else torch.device("cpu")

    def exchange(numbers: Sequence[float]) -> Sequence[Sequence[float]]:
        row = torch.tensor(numbers, dtype=torch.float64, device=where)
        return [part.tolist() for part in _fill(_parts(row, process_group), process_group, over)]

    return meet_by(exchange)


def gather_texts(
    text: str, meet: Meet, process_group: ProcessGroup, device: torch.device, sizes: Sequence[float] | None = None
) -> Iterator[str]:
    """Gather every rank's text, in the order of the ranks, decoded where it is read; collective.

    Args:
        sizes: bytes of the texts of all ranks of ``meet``, where an earlier meeting has told; None to meet for them.
    """
    data = text.encode()
    if sizes is None:
        sizes = [size for size, *_ in meet(float(len(data)), 0.0)]
    most = int(max(1.0, *sizes))  # of all replicas, where it meets those
    parts: list[Tensor] = []

    def allocate() -> None:
        part = torch.frombuffer(bytearray(data.ljust(most)), dtype=torch.uint8).to(device)
        parts.extend(_parts(part, process_group))

    needed = most * (group_size(process_group) + 1)
    allocate_together(needed, device, allocate, meet, "what they tell each other of what moves")
    _fill(parts, process_group)
    return (part.cpu().numpy().tobytes().decode().rstrip() for part in parts)


def wait_for_all(transfers: Mapping[int, Sequence[Waitable]]) -> dict[int, RuntimeError]:
    """Wait for transfers with other ranks, and return the first error with each rank where one failed."""
    errors: dict[int, RuntimeError] = {}
    for peer, works in transfers.items():
        for work in works:
            try:
                work.wait()
            except RuntimeError as error:
                errors.setdefault(peer, error)
    return errors


@torch.no_grad()
def sum_alike(tensor: Tensor, senders: Sequence[int], holders: Sequence[int], process_group: ProcessGroup) -> None:
    """Put the sum of some ranks' tensors in place of it on all holders, bitwise alike; collective over these alone.

    Args:
        senders: whose tensors are added up, in this order.
        holders: the ranks of the group that call, senders among them.

    Raises:
        RuntimeError: if one of them does not come; the tensor is as it was then.
    """
    rank, here = group_rank(process_group), tensor.detach().contiguous()
    here = here.to(message_device(process_group, tensor.device))
    receives = {sender: torch.empty_like(here) for sender in senders if sender != rank}
    sends = {holder: here for holder in holders if holder != rank and rank in senders}
    for error in wait_for_all(start_messages(sends, receives, process_group)).values():
        raise error
    total, *others = (receives.get(sender, here) for sender in senders)
    for other in others:
        total.add_(other)
    tensor.copy_(total)


def meet_prepared(
    meet: Meet, numbers: Sequence[float] | Exception, what: str, *, moves: bool = False
) -> Sequence[Sequence[float]]:
    """Return the numbers of every rank, or let all know why this one cannot give any; collective.

    Args:
        numbers: of this rank, the first of them not negative; or what kept it from giving any.
        what: is prepared, for errors.
        moves: whether that is something that moves, which errors then say has not.

    Raises:
        ValueError: what is given, if it is one.
        NotEnoughMemoryError: on every rank, if all that failed is that memory ran out on some, naming them.
        RuntimeError: for any other that is given, on every rank, naming those that gave one, and why; a
            :class:`CannotMoveError` of what moves. And if a rank does not come.
    """
    error = numbers if isinstance(numbers, Exception) else None
    if isinstance(numbers, Exception):
        numbers = [_RAN_OUT if is_out_of_memory(numbers) else _FAILED, *text_numbers(reason(numbers))]
    try:
        table = meet(*numbers)
    except RuntimeError as gone:
        if error is None:
            raise RuntimeError(f"{_head(moves)}{gone}") from gone
        table = [numbers]  # this rank's error says more
    failed = [row for row, (number, *_) in enumerate(table) if number < 0.0]
    if isinstance(error, ValueError):
        raise error
    if failed:
        # All ranks raise the same kind: some may go on after one of them.
        kind = CannotMoveError if moves else RuntimeError
        kind = NotEnoughMemoryError if all(table[row][0] == _RAN_OUT for row in failed) else kind
        who = f"{_named(failed, meet)} failed" if len(table) > 1 else "this rank failed"
        whys = [text_of(table[row][1:]) for row in failed]
        why = whys[0] if len(set(whys)) == 1 else by_rank(whys, [_number(row, meet) for row in failed])
        raise kind(f"{_head(moves)}{who} while preparing {what}: {why}") from error
    return table


def agreed(
    meet: Meet,
    make: Callable[[], _T],
    numbers_of: Callable[[_T], Sequence[float]] = lambda _: (0.0, 0.0),
    *,
    what: str,
    moves: bool = False,
) -> tuple[_T, Sequence[Sequence[float]]]:
    """Return what ``make`` makes here and numbers of every rank, or let all know where it fails on one; collective.

    Args:
        numbers_of: what was made: numbers that all ranks are told, the first of them not negative.
        what, moves: as of :func:`meet_prepared`.
    """
    made: Any = None
    numbers: Sequence[float] | Exception
    try:
        made = make()
        numbers = numbers_of(made)
    except Exception as error:  # the others must hear of any
        numbers = error
    return made, meet_prepared(meet, numbers, what, moves=moves)


def let_others_know(process_group: Any, device: Any, error: Exception) -> None:
    """Let ranks that begin by agreeing in a group fail at once, where this one was given what is not allowed."""
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):  # it may be just this that is wrong
        where = torch.accelerator.current_accelerator() or torch.device("cpu")
    meet_prepared(meet_over(require_group(process_group), where), error, ARGUMENTS)


def require_same(numbers: Sequence[float], what: str, meet: Meet, *, moves: bool = False) -> None:
    """Raise RuntimeError unless all ranks gave the same number, naming the ranks that agree with each other."""
    if len(set(numbers)) > 1:
        groups = alike(numbers, [_number(row, meet) for row in range(len(numbers))])
        who = f"{_head(moves)}the ranks of the {_whose(meet)}"
        raise RuntimeError(f"{who} differ in {what}: {groups}{at_fault(groups)}")


def make_alike(
    meet: Meet, make: Callable[[], _T], describe: Callable[[_T], object], what: str, same: str | None = None
) -> _T:
    """Return what ``make`` returns, once all ranks have made the same; collective.

    Of what was made ``describe`` returns values for JSON, to be the same on all ranks. Errors name ``what`` is made,
    and what is to be the ``same``, where that is something else.

    Raises:
        Exception: what ``make`` raises here.
        RuntimeError: if it failed on another rank, ranks differ in what they made, or one does not come.
    """
    made, table = agreed(meet, make, lambda made: (fingerprint(json.dumps(describe(made))), 0.0), what=what)
    require_same([number for number, *_ in table], same or what, meet)
    return made


def gather_reasons(meet: Meet, *reasons: str | None) -> list[str | None]:
    """Return why ranks cannot do some things: of each this one's reason, or the first of the others; collective."""
    table = meet(*(number for reason in reasons for number in text_numbers(reason or "")))
    known = [reason or None for reason in reasons]
    for row, numbers in enumerate(map(iter, table)):
        for place, text in enumerate([text_of(numbers) for _ in reasons]):
            if text and known[place] is None:
                known[place] = f"{text} (rank {_number(row, meet)} of the {_whose(meet)})"
    return known


def text_numbers(text: str) -> list[float]:
    """Return the first line of a text as numbers that ranks may meet with, at most a thousand; for :func:`text_of`."""
    data = text.strip().partition("\n")[0].encode()[:_MOST_TOLD]
    return [float(len(data)), *map(float, data)]


def text_of(numbers: Iterable[float]) -> str:
    """Return the text that a rank has given as :func:`text_numbers`, whatever follows; empty if it gave none.

    Of an iterator it takes no more than the text.
    """
    rest = map(int, numbers)
    return bytes(byte & 255 for byte in itertools.islice(rest, max(next(rest, 0), 0))).decode(errors="ignore")


def require_received(
    error: BaseException | None, meet: Meet, number: float = 0.0, left: timedelta | None = None
) -> list[float]:
    """Return a number of every rank, once all of them have received all; collective.

    Args:
        error: what kept this rank from it; None if it has received all.
        left: how long to wait for the others where this rank has failed, at least a second; None for the group's time
            limit. It may have waited for as long already, for a rank that will not come to this either.
    """
    sent = [0.0, number] if error is None else [1.0, number, *text_numbers(reason(error))]
    try:
        if error is None or left is None:
            table = meet(*sent)
        else:
            table = within(max(left, _LEAST_WAIT), lambda: meet(*sent))
    except TimeoutError:
        raise RuntimeError(f"{_NOTHING_CHANGED}: {reason(error) if error else 'no answer'}") from error
    except RuntimeError as gone:
        raise RuntimeError(f"{_NOTHING_CHANGED}: {gone}") from (error or gone)
    if error is not None:
        raise RuntimeError(f"{_NOTHING_CHANGED}: {reason(error)}") from error
    if failed := [rank for rank, (has_failed, *_) in enumerate(table) if has_failed]:
        why = text_of(table[failed[0]][2:])
        raise RuntimeError(f"{_NOTHING_CHANGED}: {_named(failed, meet)} have not received everything: {why}")
    return [number for _, number, *_ in table]


def allocate_together(
    needed: int,
    device: torch.device,
    allocate: Callable[[], None],
    meet: Meet,
    what: str = "new tensors",
    check: Callable[[Sequence[Sequence[float]]], None] | None = None,
) -> None:
    """Call ``allocate`` where what it needs fits, and go on once every rank has; collective.

    Ranks on one CPU, or on one GPU, share what is free there.

    Args:
        needed: bytes that this rank's ``allocate`` takes on ``device``, and what else must be free. It must not fill
            them: they are taken before other ranks have told what they need.
        what: it is for, for errors.
        check: is given what ``meet`` returned before memory is compared, unless a rank has failed; raises what all
            ranks are to raise.

    Raises:
        NotEnoughMemoryError: on every rank, naming those that lack memory, and how much; or those where ``allocate``
            runs out of memory all the same, and why.
        Exception: what else ``allocate`` raises; the other ranks then raise a RuntimeError.
    """
    free = free_bytes(device)
    free_here = math.inf if free is None else float(max(free, 0))
    place_here = fingerprint(_place_of(device))

    def allocate_what_fits() -> None:
        if needed <= free_here:
            allocate()

    needs = float(needed), free_here, place_here
    _, table = agreed(meet, allocate_what_fits, lambda _: needs, what=what, moves=True)
    if check is not None:
        check(table)
    all_needed, frees, places = zip(*(row[:3] for row in table), strict=True)
    rows = range(len(table))
    lacks = {row: all_needed[row] - frees[row] for row in rows if all_needed[row] > frees[row]}
    if not lacks:  # each has enough by itself
        for row in rows:
            sharing = [other for other in rows if places[other] == places[row]]
            lack = sum(all_needed[other] for other in sharing) - min(frees[other] for other in sharing)
            if all_needed[row] and lack > 0.0:
                lacks[row] = lack
    if lacks:
        sizes = ((_number(row, meet), size_text(lack), size_text(all_needed[row])) for row, lack in lacks.items())
        text = "; ".join(f"rank {number} lacks {lack}, of {needed} that it needs" for number, lack, needed in sizes)
        raise NotEnoughMemoryError(f"{_NOTHING_CHANGED}, as there is not enough memory for {what}: {text}")


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that may be allocated on ``device``, less a margin; None where that is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + cached) * (1.0 - _MARGIN))
    if device.type != "cpu" or not _MEMINFO.exists():
        return None
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    if available is None:
        return None
    left_to_container = math.inf
    with suppress(OSError, ValueError):  # no such files, or "max": no limit
        most, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        left_to_container = max(most - used, 0)
    return int(min(int(available[1]) * 1024, left_to_container) * (1.0 - _MARGIN))


def bytes_up_to_peak(device: torch.device) -> int:
    """Return by how many bytes more was allocated on a GPU at most so far; zero on other devices.

    So much will be taken again by the next forward and backward. Between them :func:`free_bytes` counts it as free.
    """
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def _head(moves: bool) -> str:
    return f"{_NOTHING_CHANGED}: " if moves else ""


def _named(rows: Sequence[int], meet: Meet) -> str:
    """The ranks that gave these rows of what ``meet`` returns, as words of an error."""
    return f"ranks {[_number(row, meet) for row in rows]} of the {_whose(meet)}"


def _whose(meet: Meet) -> str:
    return "job" if isinstance(meet, MeetReplicas) else "group"


def _number(row: int, meet: Meet) -> int:
    return meet.ranks[row] if isinstance(meet, MeetReplicas) else row


def _place_of(device: torch.device) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if device.type == "cuda" else ""
    return f"{socket.gethostname()} {device} {visible}"


def _parts(tensor: Tensor, process_group: ProcessGroup) -> list[Tensor]:
    """Memory for a tensor of every rank, of which this one's is there."""
    rank, num_ranks = process_group.rank(), group_size(process_group)
    return [tensor if peer == rank else torch.empty_like(tensor) for peer in range(num_ranks)]


def _fill(parts: Sequence[Tensor], process_group: ProcessGroup, over: Channel | None = None) -> Sequence[Tensor]:
    """From rank to rank: a collective could not tell who did not come."""
    rank, ranks = process_group.rank(), group_ranks(process_group)
    receives = {peer: part for peer, part in enumerate(parts) if peer != rank}
    tag = 0 if over is None else _MET_ASIDE
    errors = wait_for_all(start_messages(dict.fromkeys(receives, parts[rank]), receives, process_group, over, tag))
    if errors:
        missing = sorted(errors)
        raise RuntimeError(
            f"ranks {missing} of the group (ranks {[ranks[peer] for peer in missing]} of the job) did not come: "
            f"{errors[missing[0]]}"
        ) from errors[missing[0]]
    return parts
