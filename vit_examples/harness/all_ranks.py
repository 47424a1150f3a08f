"""What all ranks of a group, or of the job where none is given, do or learn together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

_T = TypeVar("_T")
LEAVE_TOGETHER_S = 30.0


def on_all_ranks(kind: type[Exception], call: Callable[[], _T], process_group: ProcessGroup | None = None) -> _T:
    """``call()``, then what has become of it on each rank; collective.

    If ``call`` is collective itself, it raises ``kind`` only where no other rank waits for it within, as
    ``Balancer.load_state_dict`` does.

    Raises:
        kind: on every rank, where it is raised on any, with what each of them says; once where all say the same.
    """
    result, failure = _tried(kind, call)
    failures = of_all_ranks(failure, process_group)
    if failure is not None and len(set(failures)) == 1:
        raise kind(failure)
    failed = [f"rank {rank}: {one}" for rank, one in enumerate(failures) if one is not None]
    if failed:
        raise kind("\n".join(failed))
    return cast("_T", result)


def on_first_rank(
    kind: type[Exception], call: Callable[[], _T], process_group: ProcessGroup | None = None
) -> _T | None:
    """Call ``call`` on the first rank alone, whose result it has; collective.

    Raises:
        kind: on every rank, where it is raised there.
    """
    is_first = dist.get_rank(process_group) == 0
    result, failure = _tried(kind, call) if is_first else (None, None)
    failure = of_all_ranks(failure, process_group)[0]
    if failure is not None:
        raise kind(failure)
    return result


def of_all_ranks(value: Any, process_group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``value``; collective."""
    values: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values


def require_same(what: str, value: str, process_group: ProcessGroup | None = None, *, is_shown: bool = False) -> None:
    """Check that every rank has the same; collective.

    Raises:
        ValueError: on every rank, naming the ranks that are alike, or, if ``is_shown``, what each of them has.
    """
    values = of_all_ranks(value, process_group)
    if len(set(values)) > 1 and is_shown:
        detail = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(values))
        raise ValueError(f"the ranks do not agree on {what}: {detail}")
    if len(set(values)) > 1:
        alike = [[rank for rank, one in enumerate(values) if one == own] for own in dict.fromkeys(values)]
        raise ValueError(f"the ranks do not agree on {what}; those that do: {alike}")


def leave_together() -> None:
    """Leave the process groups once all ranks of the job want to: gloo may abort a rank whose peers left early.

    A rank that never comes is not waited for longer than ``LEAVE_TOGETHER_S`` seconds.
    """
    if dist.get_backend() == "gloo":
        with suppress(RuntimeError):  # unlike barrier(), it leaves nothing pending that the group's end waits for
            dist.monitored_barrier(timeout=timedelta(seconds=LEAVE_TOGETHER_S))
    dist.destroy_process_group()


def _tried(kind: type[Exception], call: Callable[[], _T]) -> tuple[_T | None, str | None]:
    try:
        return call(), None
    except kind as error:
        return None, str(error)
