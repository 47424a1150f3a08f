"""What stages of a pipeline send to each other: activations forward, gradients back, for any number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import Waitable, message_device, start_messages
from zeroresize.strategy.running.activations import Activation


class Neighbour(Protocol):
    """Stands for the stage before or behind, or nobody."""

    def exchange(self, sent: Tensor | None = None, num_tokens: int = 0) -> Tensor | None:
        """Send a tensor, and wait for one of so many tokens if there are any.

        Raises:
            ValueError: if what is sent is not what was found on the meta device.
            RuntimeError: if the neighbour does not come, naming it.
        """

    def finish(self) -> None:
        """Wait until everything is sent."""


class Nobody:
    """Stands before the first stage and behind the last one: nothing is sent or received."""

    def exchange(self, sent: Tensor | None = None, num_tokens: int = 0) -> Tensor | None:
        return None

    def finish(self) -> None:
        pass


class AdjacentStage:
    """Sends tensors of one kind to the stage before or behind, and receives them from there.

    What is sent and awaited at one time is started as one: with NCCL two ranks that both send first would wait for
    each other for ever. What is only sent travels while this stage computes.

    Args:
        process_group: the pipeline's.
        peer: the neighbour's rank within the group.
        activation: what is handed over; gradients are of the same shape.
        device: on which activations are computed. They travel over the CPU where the group cannot send from there.
    """

    def __init__(self, process_group: ProcessGroup, peer: int, activation: Activation, device: torch.device) -> None:
        self._process_group, self._peer = process_group, peer
        self._activation, self._device = activation, device
        self._where = message_device(process_group, device)
        self._under_way: list[tuple[Mapping[int, Tensor], list[Waitable]]] = []

    def exchange(self, sent: Tensor | None = None, num_tokens: int = 0) -> Tensor | None:
        if sent is not None:
            self._require_known(sent)
        sends = {} if sent is None else {self._peer: sent.detach().contiguous().to(self._where)}
        receives = {self._peer: self._activation.empty(num_tokens, self._where)} if num_tokens else {}
        if sends or receives:
            works = start_messages(sends, receives, self._process_group)
            self._under_way.append((sends, works[self._peer]))
        if not receives:
            return None
        self.finish()
        return receives[self._peer].to(self._device)

    def finish(self) -> None:
        while self._under_way:
            _, works = self._under_way.pop(0)
            for work in works:
                work.wait()

    def _require_known(self, sent: Tensor) -> None:
        activation = Activation(tuple(sent.shape[1:]), sent.dtype)
        if activation != self._activation:
            raise ValueError(
                f"a stage hands on {activation}, where the layers on the meta device told {self._activation}: what "
                "layers return must not depend on the device or on the number of tokens"
            )
