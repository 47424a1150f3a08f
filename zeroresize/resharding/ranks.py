"""What ranks of a group tell each other during a check, so that all of them come to the same result, or fail alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import all_reduce, broadcast, group_rank, group_size, message_device
from zeroresize.resharding.agreement import gather_texts, meet_over
from zeroresize.utils.hashing import fingerprint

_T = TypeVar("_T")
_FAILED, _WELL = 0.0, 1.0


class TogetherError(ValueError):
    """Raised by :meth:`Ranks.together` on every rank."""


class _ElsewhereError(RuntimeError):
    """Another rank has failed, or has come to another layer."""


class Ranks:
    """Exchanges plain values and sums between the ranks of a group, from a model's device; every call is collective."""

    def __init__(self, process_group: ProcessGroup, device: torch.device) -> None:
        self.process_group, self.device = process_group, device
        self.rank, self.size = group_rank(process_group), group_size(process_group)
        self.meet = meet_over(process_group, device)
        self._messages = message_device(process_group, device)

    def share(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of the ranks: of what JSON can hold."""
        return list(map(json.loads, gather_texts(json.dumps(value), self.meet, self.process_group, self._messages)))

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors."""
        message = tensor.detach().to(self._messages, copy=True).contiguous()
        all_reduce(message, self.process_group)
        return message.to(tensor.device)

    def give_first(self, tensor: Tensor) -> None:
        """Fill ``tensor`` with that of the first rank."""
        message = tensor.detach().to(self._messages, copy=True).contiguous()
        broadcast(message, 0, self.process_group)
        tensor.detach().copy_(message)

    def arrive(self, place: str) -> None:
        """Meet the others at a place of the program, before a collective in which a failed rank would be waited for."""
        if len({tuple(row) for row in self.meet(_WELL, fingerprint(place))}) > 1:
            raise _ElsewhereError

    def together(self, call: Callable[[], _T], *, meets: bool = False) -> _T:
        """Return what ``call`` returns, or raise TogetherError on every rank with what it has raised on some.

        Args:
            meets: whether it arrives at places, where others are to hear that it has failed.
        """
        failure, error, result = "", None, None
        try:
            result = call()
            if meets:
                self.arrive("the end")
        except TogetherError:
            raise
        except _ElsewhereError:
            failure = " "
        except Exception as raised:
            error, failure = raised, f"{type(raised).__name__}: {raised}"
            if meets:
                self.meet(_FAILED, 0.0)
        failures = {rank: text for rank, text in enumerate(self.share(failure)) if text}
        if failures:
            reasons = [f"rank {rank}: {text}" for rank, text in failures.items() if text != " "]
            different = "the ranks run different layers: one came to a layer that another left out"
            raise TogetherError("; ".join(reasons) or different) from error
        return result  # type: ignore[return-value]
