"""Messages of one stage with the stages before and behind: activations forward, gradients back, as instructions say.

Both sides of a message must know its shape. Where they do not yet, it follows a header that tells it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import Waitable, group_rank, group_size, message_device, start_messages
from zeroresize.comm.words import begin_pipeline
from zeroresize.runtime.activations import Boundary, boundary_of, from_text, to_text
from zeroresize.runtime.instructions import Instruction, Kind
from zeroresize.utils.torch_state import is_out_of_memory

#: Of a header: enough for a hundred tensors.
_HEADER_BYTES = 8192
#: Of a micro-batch; those with one key are alike.
Key = TypeVar("Key", bound=Hashable)


class StageMessages(Generic[Key]):
    """Starts a stage's messages in a step and waits for them.

    Of micro-batches, by their keys [M], it is known ``before`` and ``behind`` what this stage is handed and hands on,
    on both sides of a boundary the same; the rest is added. Messages travel over the CPU where the group, whose first
    rank is the first stage, cannot send from ``device``.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        device: torch.device,
        keys: Sequence[Key],
        before: dict[Key, Boundary],
        behind: dict[Key, Boundary],
    ) -> None:
        begin_pipeline(process_group)
        self._process_group, self._device, self._keys = process_group, device, keys
        self._stage = group_rank(process_group)
        self.has_before, self.has_behind = self._stage > 0, self._stage + 1 < group_size(process_group)
        self._where = message_device(process_group, device)
        self._known = {-1: before, 1: behind}
        self._under_way: dict[Instruction, tuple[list[Tensor], list[Waitable]]] = {}

    def send(self, instruction: Instruction, tensors: tuple[Tensor, ...]) -> None:
        """Start sending what a micro-batch has brought forth; activations must be what they are known to be."""
        sent = [tensor.detach().contiguous().to(self._where) for tensor in tensors]
        if instruction.kind is Kind.SEND_ACT_START:
            known, key = self._known[1], self._keys[instruction.microbatch]
            if key in known:
                self._require_known(instruction, known[key], boundary_of(tensors))
            else:
                known[key] = boundary_of(tensors)
                sent.insert(0, self._header(to_text([known[key]])))
        self._start(instruction, sent, sends=True)

    def send_failure(self, instruction: Instruction) -> None:
        """Tell the stage behind, which waits for a header, that nothing will come."""
        self._start(instruction, [self._header("")], sends=True)
        self._finish(Instruction(instruction.kind.wait, instruction.microbatch))

    def receive(self, instruction: Instruction) -> None:
        """Start receiving; where the shape is not known, wait for it."""
        if not (self.has_before if instruction.kind.peer < 0 else self.has_behind):
            raise ValueError(f"stage {self._stage} is told {instruction}, and has no stage on that side")
        key = self._keys[instruction.microbatch]
        known = self._known[instruction.kind.peer]
        if key not in known:
            known[key] = self._read_header(instruction)
        boundary = known[key]
        if instruction.kind is Kind.RECV_GRAD_START:
            boundary = tuple(tensor for tensor in boundary if tensor.requires_grad)
        self._start(instruction, [tensor.empty(self._where) for tensor in boundary], sends=False)

    def wait(self, instruction: Instruction) -> tuple[Any, ...]:
        """Wait for what was started, and return the tensors of the boundary where something is received.

        They are activations that require gradients as those sent did, or gradients, None for those that have none.

        Raises:
            RuntimeError: if the other stage does not come, naming it.
        """
        tensors = self._finish(instruction)
        if instruction.kind not in (Kind.WAIT_RECV_ACT, Kind.WAIT_RECV_GRAD):
            return ()
        received = iter([tensor.to(self._device) for tensor in tensors])
        boundary = self._known[instruction.kind.peer][self._keys[instruction.microbatch]]
        if instruction.kind is Kind.WAIT_RECV_GRAD:
            return tuple(next(received) if shape.requires_grad else None for shape in boundary)
        return tuple(
            tensor.requires_grad_(shape.requires_grad and torch.is_grad_enabled())
            for tensor, shape in zip(received, boundary, strict=True)
        )

    def _header(self, text: str) -> Tensor:
        data = text.encode()
        if len(data) > _HEADER_BYTES:
            raise ValueError(f"stage {self._stage} hands on too many tensors: {len(data)} bytes describe them")
        return torch.frombuffer(bytearray(data.ljust(_HEADER_BYTES)), dtype=torch.uint8).to(self._where)

    def _read_header(self, instruction: Instruction) -> Boundary:
        """What the stage before tells of its next activations."""
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device=self._where)
        self._start(instruction, [header], sends=False)
        self._finish(Instruction(instruction.kind.wait, instruction.microbatch))
        text = bytes(header.tolist()).decode().strip()
        if not text:
            raise RuntimeError(f"stage {self._peer(instruction)} has failed before it handed anything on")
        return from_text(text)[0]

    def _start(self, instruction: Instruction, tensors: list[Tensor], *, sends: bool) -> None:
        peer = self._peer(instruction)
        works: list[Waitable] = []
        with _named(instruction, peer):
            for tensor in tensors:
                messages = {peer: tensor}
                works += start_messages(messages if sends else {}, {} if sends else messages, self._process_group)[peer]
        self._under_way[instruction] = tensors, works

    def _finish(self, instruction: Instruction) -> list[Tensor]:
        tensors, works = self._under_way.pop(Instruction(instruction.kind.start, instruction.microbatch))
        with _named(instruction, self._peer(instruction)):
            for work in works:
                work.wait()
        return tensors

    def _peer(self, instruction: Instruction) -> int:
        return self._stage + instruction.kind.peer

    def _require_known(self, instruction: Instruction, known: Boundary, given: Boundary) -> None:
        is_same = [(one.shape, one.dtype) for one in known] == [(one.shape, one.dtype) for one in given]
        if not is_same or any(new.requires_grad > old.requires_grad for new, old in zip(given, known, strict=True)):
            raise ValueError(
                f"stage {self._stage} hands on {', '.join(map(str, given))} of micro-batch {instruction.microbatch}, "
                f"where {', '.join(map(str, known))} is expected, as of another one of the same sizes, or of layers on "
                "the meta device: what layers return must not depend on anything else"
            )


_OF_ACTIVATIONS = (Kind.SEND_ACT_START, Kind.RECV_ACT_START, Kind.WAIT_SEND_ACT, Kind.WAIT_RECV_ACT)


@contextmanager
def _named(instruction: Instruction, peer: int) -> Iterator[None]:
    """Errors tell which message failed, and with which stage."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):  # no other stage is to blame
            raise
        what = "activation" if instruction.kind in _OF_ACTIVATIONS else "gradient"
        raise RuntimeError(
            f"{instruction} failed, the {what} of micro-batch {instruction.microbatch} with stage {peer}: {error}"
        ) from error
