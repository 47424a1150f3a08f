"""Work beside what a rank computes, such as the messages of a move: a thread, and on a GPU a stream of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

_T = TypeVar("_T")


class BackgroundCall(Generic[_T]):
    """Calls a function in another thread from now on, which does not keep the process from ending.

    Args:
        call: must not raise what only this thread could mend: its error is raised by :meth:`result`.
        device: on a GPU the call works on a stream of its own, behind what has been given to the present one.
        wait_before: called in the other thread first, such as for the end of an earlier call over the same links.
    """

    def __init__(
        self, call: Callable[[], _T], device: torch.device, wait_before: Callable[[], object] = lambda: None
    ) -> None:
        self._device = device
        self._result: _T
        self._error: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._thread = threading.Thread(target=self._run, args=(call, wait_before), name="zeroresize move", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end of the call."""
        self._thread.join()

    def result(self) -> _T:
        """Wait for the end of the call and return what it returned.

        Raises:
            BaseException: what the call raised.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self, call: Callable[[], _T], wait_before: Callable[[], object]) -> None:
        try:
            wait_before()
            with torch.no_grad(), torch.cuda.stream(self._stream):
                self._result = call()
                if self._stream is not None:
                    self._stream.synchronize()
        except BaseException as error:
            self._error = error
