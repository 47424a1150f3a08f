"""Every private name of torch that this package uses: what it is for, and what happens where a version lacks it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed import ProcessGroup, Store, distributed_c10d

_c10d: Any = distributed_c10d


def default_store() -> Store:
    """Return the store of the job, ``distributed_c10d._get_default_store``, where ranks of any group can meet.

    Nothing can do without it: torch has no public way to the store that ``init_process_group`` was given or has made.
    """
    return _c10d._get_default_store()


def known_groups() -> dict[ProcessGroup, str]:
    """Return all process groups that torch knows here with their names, of ``distributed_c10d._world.pg_names``.

    Without it a group that torch could only half make would stay with torch; where the name is missing there are none.
    """
    return dict(getattr(getattr(_c10d, "_world", None), "pg_names", {}))


@contextmanager
def name_of_next_group(name: str) -> Iterator[None]:
    """Give the next group that this thread makes by ``torch.distributed.new_group`` a name, which is its prefix.

    ``new_group`` has no argument for it and asks ``distributed_c10d._process_group_name``, which is replaced until it
    is called. Where it is missing, groups keep the names that torch gives them: then a group that ranks make after they
    have made different numbers of groups ends in an error at the time limit.
    """
    usual = getattr(_c10d, "_process_group_name", None)
    if usual is None:
        yield
        return
    thread = threading.get_ident()

    def given(ranks: Sequence[int], use_hashed_name: bool) -> str:
        if threading.get_ident() != thread:
            return usual(ranks, use_hashed_name)
        restore()
        return name

    def restore() -> None:
        if _c10d._process_group_name is given:
            _c10d._process_group_name = usual

    _c10d._process_group_name = given
    try:
        yield
    finally:
        restore()
