"""What ranks of a group tell each other during a check, so that all of them come to the same result, or fail alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import all_gather, all_reduce, broadcast, group_rank, group_size, message_device
from zeroresize.resharding.agreement import meet_over
from zeroresize.utils.hashing import fingerprint

_T = TypeVar("_T")
_FAILED, _WELL = 0.0, 1.0
#: Bytes that travel at once, and of the length of a text before it.
_SHORT, _DIGITS = 256, 16


class TogetherError(ValueError):
    """Raised by :meth:`Ranks.together` on every rank."""


class _ElsewhereError(RuntimeError):
    """Another rank has failed, or has come to another layer."""


class Ranks:
    """Exchanges plain values and sums between the ranks of a group; every call is collective.

    Args:
        device: of the model.
    """

    def __init__(self, process_group: ProcessGroup, device: torch.device) -> None:
        self.process_group, self.device = process_group, device
        self.rank, self.size = group_rank(process_group), group_size(process_group)
        self.meet = meet_over(process_group, device)
        self._messages = message_device(process_group, device)

    def share(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of the ranks: of what JSON can hold."""
        text = json.dumps(value).encode()
        parts = self._gathered(f"{len(text):<{_DIGITS}}".encode() + text, _SHORT)
        most = max(int(part[:_DIGITS]) for part in parts) + _DIGITS
        if most > _SHORT:
            parts = self._gathered(b" " * _DIGITS + text, most)
        return [json.loads(part[_DIGITS:]) for part in parts]

    def _gathered(self, text: bytes, length: int) -> list[bytes]:
        message = torch.frombuffer(bytearray(text[:length].ljust(length)), dtype=torch.uint8).to(self._messages)
        return [part.cpu().numpy().tobytes() for part in all_gather(message, self.process_group)]

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
        rows = self.meet(_WELL, fingerprint(place))
        if len({tuple(row) for row in rows}) > 1:
            raise _ElsewhereError

    def together(self, call: Callable[[], _T], *, meets: bool = False) -> _T:
        """Return what ``call`` returns.

        Args:
            meets: whether it arrives at places, where others are to hear that it has failed.

        Raises:
            TogetherError: on every rank, where it has raised on some, with what they have raised.
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
