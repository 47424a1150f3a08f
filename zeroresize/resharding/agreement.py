"""Ranks of a group agree before anything moves, and tell each other when one of them cannot."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    group_ranks,
    group_size,
    message_device,
    require_group,
    start_messages,
)
from zeroresize.comm.exchange import Meet, meet_by
from zeroresize.utils.deadline import within
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.texts import alike, at_fault
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
#: What a rank meets with that has failed before, and where its memory ran out.
_FAILED, _RAN_OUT = -1.0, -2.0


class CannotMoveError(RuntimeError):
    """Tells that something cannot move, on this rank or another; nothing has changed on any rank."""


class NotEnoughMemoryError(RuntimeError):
    """Tells that a move does not fit into the memory of some ranks; nothing has changed on any rank."""


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


def meet_prepared(
    meet: Meet, numbers: Sequence[float] | Exception, what: str = "what moves"
) -> Sequence[Sequence[float]]:
    """Return the numbers of every rank, or let all know that this one cannot give any; collective.

    Args:
        numbers: of this rank, the first of them not negative; or what kept it from giving any.
        what: is prepared, for errors where memory runs out.

    Raises:
        ValueError: what is given, if it is one.
        NotEnoughMemoryError: on every rank, if all that failed is that memory ran out on some.
        CannotMoveError: for any other that is given, and on the other ranks, naming those that gave one.
        RuntimeError: if a rank does not come.
    """
    if isinstance(numbers, Exception):
        ran_out = is_out_of_memory(numbers)
        table: Sequence[Sequence[float]] = ()
        with suppress(RuntimeError):  # this rank's error says more
            table = meet(_RAN_OUT if ran_out else _FAILED)
        if isinstance(numbers, ValueError):
            raise numbers
        # All ranks raise the same kind: some may go on after one of them.
        if ran_out and not any(number == _FAILED for number, *_ in table):
            raise NotEnoughMemoryError(f"{_NOTHING_CHANGED}, preparing {what}: {reason(numbers)}") from numbers
        raise CannotMoveError(f"{_NOTHING_CHANGED}: {reason(numbers)}") from numbers
    table = meet_unchanged(meet, *numbers)
    failed = [rank for rank, (number, *_) in enumerate(table) if number < 0.0]
    if failed:
        kind = NotEnoughMemoryError if all(table[rank][0] == _RAN_OUT for rank in failed) else CannotMoveError
        raise kind(f"{_NOTHING_CHANGED}: {_named(failed, meet)} failed before; their errors tell why")
    return table


def agreed(
    meet: Meet,
    make: Callable[[], _T],
    numbers_of: Callable[[_T], Sequence[float]] = lambda _: (0.0, 0.0),
    what: str = "what moves",
) -> tuple[_T, Sequence[Sequence[float]]]:
    """Return what ``make`` makes here and numbers of every rank, or let all know where it fails on one; collective.

    Args:
        numbers_of: what was made: numbers that all ranks are told, the first of them not negative.
        what: is made, for errors where memory runs out.
    """
    made: Any = None
    numbers: Sequence[float] | Exception
    try:
        made = make()
        numbers = numbers_of(made)
    except Exception as error:  # the others must hear of any
        numbers = error
    return made, meet_prepared(meet, numbers, what)


def let_others_know(process_group: Any, device: torch.device | str | None, error: Exception) -> None:
    """Let ranks that begin by agreeing in a group fail at once, where this one was given what is not allowed."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    meet_prepared(meet_over(require_group(process_group), torch.device(device)), error)


def require_same(numbers: Sequence[float], what: str, meet: Meet) -> None:
    """Raise RuntimeError unless all ranks gave the same number, naming the ranks that agree with each other."""
    if len(set(numbers)) > 1:
        groups = alike(numbers, [_number(row, meet) for row in range(len(numbers))])
        raise RuntimeError(
            f"{_NOTHING_CHANGED}: the ranks of the {_whose(meet)} differ in {what}: {groups}{at_fault(groups)}"
        )


def meet_unchanged(meet: Meet, *numbers: float) -> Sequence[Sequence[float]]:
    """Return what ``meet`` returns; its error then says that nothing has moved yet; collective."""
    try:
        return meet(*numbers)
    except RuntimeError as error:
        raise RuntimeError(f"{_NOTHING_CHANGED}: {error}") from error


def require_received(
    error: BaseException | None, meet: Meet, number: float = 0.0, left: timedelta | None = None
) -> list[float]:
    """Return a number of every rank, once all of them have received all; collective.

    Args:
        error: what kept this rank from it; None if it has received all.
        left: how long to wait for the others where this rank has failed, at least a second; None for the group's time
            limit. It may have waited for as long already, for a rank that will not come to this either.
    """
    try:
        if error is None or left is None:
            table = meet(0.0 if error is None else 1.0, number)
        else:
            table = within(max(left, _LEAST_WAIT), lambda: meet(1.0, number))
    except TimeoutError:
        raise RuntimeError(f"{_NOTHING_CHANGED}: {reason(error) if error else 'no answer'}") from error
    except RuntimeError as gone:
        raise RuntimeError(f"{_NOTHING_CHANGED}: {gone}") from (error or gone)
    if error is not None:
        raise RuntimeError(f"{_NOTHING_CHANGED}: {reason(error)}") from error
    if failed := [rank for rank, (has_failed, *_) in enumerate(table) if has_failed]:
        raise RuntimeError(f"{_NOTHING_CHANGED}: {_named(failed, meet)} have not received everything")
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
        NotEnoughMemoryError: on every rank, naming those that lack memory, and how much; also where ``allocate`` runs
            out of memory all the same, as if nothing were free there.
        Exception: what else ``allocate`` raises; the other ranks then raise a RuntimeError.
    """
    free = free_bytes(device)
    free_here = math.inf if free is None else float(max(free, 0))
    place_here = fingerprint(_place_of(device))
    numbers: Sequence[float] | Exception = [float(needed), free_here, place_here]
    ran_out: Exception | None = None
    if needed <= free_here:
        try:
            allocate()
        except Exception as error:  # the others must hear of any
            numbers = error
            if is_out_of_memory(error):
                ran_out, numbers = error, [float(max(needed, 1)), 0.0, place_here]
    table = meet_prepared(meet, numbers)
    if check is not None:
        check(table)
    all_needed, frees, places = zip(*(row[:3] for row in table), strict=True)
    lacks = []
    for rank, needed_there in enumerate(all_needed):
        sharing = [other for other, place in enumerate(places) if place == places[rank]]
        lack = sum(all_needed[other] for other in sharing) - min(frees[other] for other in sharing)
        if needed_there and lack > 0.0:
            needs = f"of {needed_there / 1e6:.1f} MB that it needs"
            lacks.append(f"rank {_number(rank, meet)} lacks {lack / 1e6:.1f} MB, {needs}")
    if lacks:
        why = "" if ran_out is None else f": {reason(ran_out)}"
        raise NotEnoughMemoryError(
            f"{_NOTHING_CHANGED}, as there is not enough memory for {what}: {'; '.join(lacks)}{why}"
        ) from ran_out


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
