"""What travels in a switch, on one rank: packed, sent, received, and put in place or added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.plan.layout import Indices
from zeroresize.resharding.transport import Pair, RoundTransport
from zeroresize.strategy.switching.switch_rounds import SwitchRound, TensorSlice


@dataclass(frozen=True)
class Ends:
    """Tells where a flow begins and ends on this rank: stacks [pre, blocks, units, inner] by the tensor's number.

    Attributes:
        sources: what is sent; None stands for zeros.
        targets: what is filled.
        source_begins, target_begins: [P], the first unit that this rank holds of each tensor.
        adds: whether what comes is added to what is there.
        dtype: of the elements as they travel, into which they are cast when they are packed; None for that of the
            tensors.
    """

    sources: Mapping[int, Tensor | None]
    targets: Mapping[int, Tensor]
    source_begins: Indices
    target_begins: Indices
    adds: bool = False
    dtype: torch.dtype | None = None

    def source(self, tensor_slice: TensorSlice) -> Tensor | None:
        """Return the units of a slice, as they are sent; None stands for zeros."""
        stack = self.sources[tensor_slice.tensor]
        return None if stack is None else _units(stack, tensor_slice, self.source_begins)

    def target(self, tensor_slice: TensorSlice) -> Tensor:
        """Return the units of a slice, as they are filled."""
        return _units(self.targets[tensor_slice.tensor], tensor_slice, self.target_begins)


class FlowTransport(RoundTransport[SwitchRound]):
    """Carries flows, such as weights, and gradients that are added where they arrive."""

    def __init__(self, rounds: Sequence[SwitchRound], process_group: ProcessGroup) -> None:
        super().__init__(rounds, lambda round_: round_.sizes, process_group)

    def carry_out_flows(self, ends: Sequence[Ends]) -> Exception | None:
        """Send and receive all rounds, and return the first failure.

        Args:
            ends: of each flow.
        """
        errors = self.carry_out(partial(_pack, ends), partial(_unpack, ends))
        self.free()
        return errors[0] if errors else None


def _pack(all_ends: Sequence[Ends], message: Tensor, round_: SwitchRound, pair: Pair) -> None:
    begin = 0
    for tensor_slice in round_.slices[pair]:
        part, begin = message[begin : begin + tensor_slice.num_bytes], begin + tensor_slice.num_bytes
        ends = all_ends[tensor_slice.flow]
        source = ends.source(tensor_slice)
        if source is None:
            part.zero_()
        else:
            part.view(ends.dtype or source.dtype).view(source.shape).copy_(source, non_blocking=message.is_cuda)


def _unpack(all_ends: Sequence[Ends], message: Tensor, round_: SwitchRound, pair: Pair) -> None:
    begin = 0
    for tensor_slice in round_.slices[pair]:
        ends = all_ends[tensor_slice.flow]
        target = ends.target(tensor_slice)
        if pair[0] == pair[1]:
            source = ends.source(tensor_slice)
            if source is not None and ends.dtype is not None:
                source = source.to(ends.dtype)  # as on the ranks to which the same travels
        else:
            part, begin = message[begin : begin + tensor_slice.num_bytes], begin + tensor_slice.num_bytes
            source = part.view(ends.dtype or target.dtype).view(target.shape)
        if source is None:
            continue
        if ends.adds:
            target.add_(source.to(target.device))
        else:
            target.copy_(source)


def _units(stack: Tensor, tensor_slice: TensorSlice, begins: Indices) -> Tensor:
    begin = int(begins[tensor_slice.tensor])
    return stack.narrow(2, tensor_slice.begin - begin, tensor_slice.end - tensor_slice.begin)
