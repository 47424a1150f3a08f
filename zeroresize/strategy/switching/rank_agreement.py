"""What all ranks of a job make alike, or none of them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_size, message_device
from zeroresize.resharding.agreement import agreed, gather_texts, meet_over, require_same
from zeroresize.utils.hashing import fingerprint

_T = TypeVar("_T")


class RankAgreement:
    """Compares what each rank of a job has made; all methods are collective over the ranks.

    Args:
        process_group: of the job's ranks.
        device: on which messages are made where the group cannot send from the CPU.

    Attributes:
        meet: the meeting of these ranks; see :func:`~zeroresize.resharding.agreement.meet_over`.
    """

    def __init__(self, process_group: ProcessGroup, device: torch.device) -> None:
        self._process_group, self._device = process_group, device
        self.meet = meet_over(process_group, device)

    def make_alike(self, make: Callable[[], _T], describe: Callable[[_T], object], what: str) -> _T:
        """Return what ``make`` returns, once all ranks have made the same.

        Args:
            make: called once, on this rank.
            describe: of what was made, values for JSON that must be the same on all ranks.
            what: was made, for the error.

        Raises:
            Exception: what ``make`` raises here.
            RuntimeError: if it failed on another rank, ranks differ in what they made, or one does not come.
        """
        made, table = agreed(self.meet, make, lambda made: (fingerprint(json.dumps(describe(made))), 0.0))
        require_same([number for number, *_ in table], what, self.meet)
        return made

    def agree_on_nodes(self, nodes: Sequence[int] | None) -> list[int]:
        """Return [R] on which node each rank is: ``nodes``, or by the ranks' host names if they are None.

        Raises:
            ValueError: if there are not as many numbers as ranks.
            RuntimeError: if ranks differ in them, or one does not come.
        """
        num_ranks = group_size(self._process_group)
        text = socket.gethostname() if nodes is None else json.dumps(list(nodes))
        where = message_device(self._process_group, self._device)
        texts = list(gather_texts(text, self.meet, self._process_group, where))
        if nodes is None:
            return [texts.index(one) for one in texts]

        def checked() -> list[int]:
            if len(nodes) != num_ranks:
                raise ValueError(f"nodes={list(nodes)}: one number for each of the {num_ranks} ranks is needed")
            return list(nodes)

        return self.make_alike(checked, list, "nodes")
