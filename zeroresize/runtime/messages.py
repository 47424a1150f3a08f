"""Messages of one stage with the stages before and behind: activations forward, gradients back, as instructions say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import Waitable, group_rank, message_device, start_messages
from zeroresize.runtime.activations import Activation, HandedOn, as_tuple
from zeroresize.runtime.instructions import Instruction, Kind


class StageMessages:
    """Starts a stage's messages and waits for them.

    Args:
        process_group: the pipeline's, first stage first.
        before, behind: what this stage is handed, and hands on; None at the ends. Gradients are of the same shapes.
        device: on which activations are computed. They travel over the CPU where the group cannot send from there.
    """

    def __init__(
        self, process_group: ProcessGroup, before: HandedOn | None, behind: HandedOn | None, device: torch.device
    ) -> None:
        self._process_group, self._device = process_group, device
        self._stage = group_rank(process_group)
        self._where = message_device(process_group, device)
        self._handed_on = {-1: before, 1: behind}
        self._under_way: dict[Instruction, tuple[list[Tensor], list[Waitable]]] = {}

    def send(self, instruction: Instruction, tensors: tuple[Tensor, ...], sizes: Mapping[str, int]) -> None:
        """Start sending what a micro-batch of these sizes has brought forth.

        Raises:
            ValueError: if it is not what was found on the meta device.
            RuntimeError: if the message cannot be started, naming the other stage.
        """
        self._require_known(instruction, tensors, sizes)
        sent = [tensor.detach().contiguous().to(self._where) for tensor in tensors]
        self._start(instruction, sent, sends=True)

    def receive(self, instruction: Instruction, sizes: Mapping[str, int]) -> None:
        """Start receiving what belongs to a micro-batch of these sizes; errors as of :meth:`send`."""
        empty = [activation.empty(sizes, self._where) for activation in self._activations(instruction)]
        self._start(instruction, empty, sends=False)

    def wait(self, instruction: Instruction) -> tuple[Tensor, ...]:
        """Wait for what was started, and return it, on the stage's device; activations as their gradients need them.

        Raises:
            RuntimeError: if the other stage does not come, naming it.
        """
        tensors, works = self._under_way.pop(Instruction(instruction.kind.start, instruction.microbatch))
        with _named(instruction, self._peer(instruction)):
            for work in works:
                work.wait()
        received = tuple(tensor.to(self._device) for tensor in tensors)
        if instruction.kind is Kind.WAIT_RECV_ACT and torch.is_grad_enabled():
            for tensor, activation in zip(received, self._activations(instruction), strict=True):
                tensor.requires_grad_(activation.requires_grad)
        return received

    def _start(self, instruction: Instruction, tensors: list[Tensor], *, sends: bool) -> None:
        peer = self._peer(instruction)
        works: list[Waitable] = []
        with _named(instruction, peer):
            for tensor in tensors:
                messages = {peer: tensor}
                works += start_messages(messages if sends else {}, {} if sends else messages, self._process_group)[peer]
        self._under_way[instruction] = tensors, works

    def _peer(self, instruction: Instruction) -> int:
        return self._stage + instruction.kind.peer

    def _activations(self, instruction: Instruction) -> HandedOn:
        activations = self._handed_on[instruction.kind.peer]
        if activations is None:
            raise ValueError(f"stage {self._stage} is told {instruction}, and has no stage on that side")
        if instruction.kind in _OF_ACTIVATIONS:
            return activations
        return tuple(activation for activation in activations if activation.requires_grad)

    def _require_known(self, instruction: Instruction, tensors: tuple[Tensor, ...], sizes: Mapping[str, int]) -> None:
        wanted = self._activations(instruction)
        returned = [(tuple(tensor.shape), tensor.dtype) for tensor in as_tuple(tensors)]
        if returned != [(activation.shape(sizes), activation.dtype) for activation in wanted]:
            kinds = (Activation(*kind) for kind in returned)
            raise ValueError(
                f"stage {self._stage} hands on {', '.join(map(str, kinds))} of micro-batch "
                f"{instruction.microbatch}, where the layers on the meta device told "
                f"{', '.join(map(str, wanted))} with {dict(sizes)}: what layers return must not depend on the device "
                "or on other sizes"
            )


_OF_ACTIVATIONS = (Kind.SEND_ACT_START, Kind.RECV_ACT_START, Kind.WAIT_SEND_ACT, Kind.WAIT_RECV_ACT)


@contextmanager
def _named(instruction: Instruction, peer: int) -> Iterator[None]:
    """Errors tell which message failed, and with which stage."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:  # no other stage is to blame
        raise
    except RuntimeError as error:
        what = "activation" if instruction.kind in _OF_ACTIVATIONS else "gradient"
        raise RuntimeError(
            f"{instruction} failed, the {what} of micro-batch {instruction.microbatch} with stage {peer}: {error}"
        ) from error
