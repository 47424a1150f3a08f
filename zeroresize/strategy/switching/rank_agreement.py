"""What all ranks of a job make alike, or none of them; all functions are collective."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

from zeroresize.comm.collectives import group_size
from zeroresize.comm.groups import free_group_number
from zeroresize.resharding.agreement import agreed, gather_texts, meet_prepared, require_same
from zeroresize.resharding.transaction import Participants
from zeroresize.utils.hashing import fingerprint

_T = TypeVar("_T")


def make_alike(job: Participants, make: Callable[[], _T], describe: Callable[[_T], object], what: str) -> _T:
    """Return what ``make`` returns, once all ranks have made the same.

    Args:
        describe: of what was made, values for JSON that must be the same on all ranks.
        what: was made, for the error.

    Raises:
        Exception: what ``make`` raises here.
        RuntimeError: if it failed on another rank, ranks differ in what they made, or one does not come.
    """
    made, table = agreed(job.meet, make, lambda made: (fingerprint(json.dumps(describe(made))), 0.0))
    require_same([number for number, *_ in table], what, job.meet)
    return made


def next_group_number(job: Participants) -> int:
    """Return a number from which on no rank has given any to a process group."""
    return int(max(number for number, *_ in meet_prepared(job.meet, (float(free_group_number()), 0.0))))


def agree_on_nodes(job: Participants, nodes: Sequence[int] | None) -> list[int]:
    """Return [R] on which node each rank is: ``nodes``, or by the ranks' host names if they are None.

    Raises:
        ValueError: if there are not as many numbers as ranks.
        RuntimeError: if ranks differ in them.
    """
    num_ranks = group_size(job.process_group)

    def checked() -> list[int]:
        if nodes is not None and len(nodes) != num_ranks:
            raise ValueError(f"nodes={list(nodes)}: one number for each of the {num_ranks} ranks is needed")
        return list(nodes or ())

    given = make_alike(job, checked, list, "nodes")
    if given:
        return given
    names = list(gather_texts(socket.gethostname(), job.meet, job.process_group, job.message_device))
    return [names.index(name) for name in names]
