"""What all ranks of a job make alike, or none of them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_size, message_device
from zeroresize.comm.groups import free_group_number
from zeroresize.resharding.agreement import agreed, gather_texts, meet_over, meet_prepared, require_same
from zeroresize.utils.hashing import fingerprint

_T = TypeVar("_T")


class RankAgreement:
    """Compares what each rank of a job has made, over their ``meet``; all methods are collective."""

    def __init__(self, process_group: ProcessGroup, device: torch.device) -> None:
        self._process_group, self._device = process_group, device
        self.meet = meet_over(process_group, device)

    def make_alike(self, make: Callable[[], _T], describe: Callable[[_T], object], what: str) -> _T:
        """Return what ``make`` returns, once all ranks have made the same.

        Args:
            describe: of what was made, values for JSON that must be the same on all ranks.
            what: was made, for the error.

        Raises:
            Exception: what ``make`` raises here.
            RuntimeError: if it failed on another rank, ranks differ in what they made, or one does not come.
        """
        made, table = agreed(self.meet, make, lambda made: (fingerprint(json.dumps(describe(made))), 0.0))
        require_same([number for number, *_ in table], what, self.meet)
        return made

    def free_group_number(self) -> int:
        """Return a number from which on no rank has given any to a process group."""
        return int(max(number for number, *_ in meet_prepared(self.meet, (float(free_group_number()), 0.0))))

    def agree_on_nodes(self, nodes: Sequence[int] | None) -> list[int]:
        """Return [R] on which node each rank is: ``nodes``, or by the ranks' host names if they are None.

        Raises:
            ValueError: if there are not as many numbers as ranks.
            RuntimeError: if ranks differ in them.
        """
        num_ranks = group_size(self._process_group)

        def checked() -> list[int]:
            if nodes is not None and len(nodes) != num_ranks:
                raise ValueError(f"nodes={list(nodes)}: one number for each of the {num_ranks} ranks is needed")
            return list(nodes or ())

        given = self.make_alike(checked, list, "nodes")
        if given:
            return given
        where = message_device(self._process_group, self._device)
        names = list(gather_texts(socket.gethostname(), self.meet, self._process_group, where))
        return [names.index(name) for name in names]
