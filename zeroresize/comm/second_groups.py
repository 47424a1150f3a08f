"""Further process groups of the same ranks, which torch does not know: nothing else waits for what travels there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.utils.torch_private import backend_of, nccl_options


class SecondGroup:
    """A :class:`~zeroresize.comm.collectives.Channel` of its own between the ranks of a group.

    Args:
        transport: the backend that connects the ranks. A process that ends while its threads live can abort: closing
            the group, also at exit, drops the only reference.

    Attributes:
        close: leaves the group.
    """

    def __init__(self, transport: Any) -> None:
        self._transport: list[Any] = [transport]
        self.close: Callable[[], object] = weakref.finalize(self, self._transport.clear)

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        """Start filling ``tensor`` on every rank with that of rank ``root`` within the group; collective."""
        return self._transport[0].broadcast(tensor, root)

    def send(self, tensors: list[Tensor], receiver: int, tag: int, /) -> Work:
        """Start sending tensors to rank ``receiver`` within the group."""
        return self._transport[0].send(tensors, receiver, tag)

    def recv(self, tensors: list[Tensor], sender: int, tag: int, /) -> Work:
        """Start filling tensors from rank ``sender`` within the group."""
        return self._transport[0].recv(tensors, sender, tag)

    def allgather(self, parts: list[Tensor], tensor: Tensor, /) -> Work:
        """Start filling ``parts`` with the ``tensor`` of each rank, in the order of the group; collective."""
        return self._transport[0].allgather([parts], [tensor])


class WeightGroup(SecondGroup):
    """A second gloo or NCCL group of the same ranks, for lent weights alone.

    Transfers of one group wait for each other: gloo starts its collectives in order, two at a time, and has one
    connection for each pair of ranks; NCCL has a stream. The weights of all layers are sent at once, so on the layers'
    own group the first sums would wait for the last weights. Every rank starts the transfers of both groups in one
    order, as NCCL asks of several communicators. With another backend weights travel on the layers' own group.

    Making it is collective over ``process_group`` only, by a :class:`~zeroresize.comm.rendezvous.Rendezvous`.

    Args:
        process_group: the group of these ranks.
        device: the device that the weights are on.

    Raises:
        RuntimeError: if not all ranks come within the time limit of ``process_group``; it names those that did not.
    """

    def __init__(self, process_group: ProcessGroup, device: torch.device) -> None:
        rendezvous = Rendezvous(process_group, "connect for the weights that are lent")
        ends = rendezvous.store, rendezvous.rank, rendezvous.size
        kind = backend_of(process_group, device).name()

        def make() -> Any:
            if kind == "gloo":
                return dist.ProcessGroupGloo(*ends, rendezvous.time_limit)
            if kind == "nccl":
                return dist.ProcessGroupNCCL(*ends, nccl_options(rendezvous.time_limit))
            return process_group

        super().__init__(rendezvous.connect(make))
