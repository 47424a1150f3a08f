"""Shapes of what layers hand to each other, found once by running every layer on one micro-batch.

torch's stages can find the shapes at their own ends, but by a run of their own after every change of layers, and that
run changes buffers such as BatchNorm's statistics. With the shapes between all layers, any stage can be built anew
without running anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import broadcast, group_rank, group_size
from zeroresize.pipeline.stage_layers import StageLayers


@dataclass(frozen=True)
class TensorShape:
    """A contiguous tensor of one micro-batch between two layers.

    Attributes:
        dtype: without ``torch.``.
        requires_grad: whether a gradient comes back.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    def example(self, device: torch.device | str) -> Tensor:
        """A tensor of this shape, of zeros."""
        return torch.zeros(self.shape, dtype=getattr(torch, self.dtype), device=device).requires_grad_(
            self.requires_grad
        )


#: All tensors between two layers, before the first or behind the last one.
Boundary = tuple[TensorShape, ...]


def boundary_of(tensors: Sequence[Tensor]) -> Boundary:
    return tuple(TensorShape(tuple(one.shape), str(one.dtype)[6:], one.requires_grad) for one in tensors)


def find_boundaries(
    stage: StageLayers, inputs: Sequence[Tensor], device: torch.device, process_group: ProcessGroup
) -> list[Boundary]:
    """The boundaries before each layer and behind the last one [L + 1]; collective.

    One stage after the other runs its layers, the first one on real data, the others on zeros. Random number generators
    and buffers are as before afterwards; whatever else layers change in a forward stays changed.

    Args:
        inputs: one micro-batch, on the first stage.

    Raises:
        RuntimeError: on the other stages, if a layer of one fails, naming it; or if a rank does not come.
        Exception: what a layer of this stage raises.
    """
    found: list[Boundary] = []
    for turn in range(group_size(process_group)):
        own, failure = "", None
        if turn == group_rank(process_group):
            try:
                before = found[-1] if found else boundary_of(inputs)
                tensors = tuple(one.example(device) for one in before) if found else tuple(inputs)
                own = _as_json([*([] if found else [before]), *_run(stage, tensors, device)])
            except Exception as error:  # the others must hear of any
                failure = error
        text = broadcast_text(own, turn, device, process_group)
        if failure is not None:
            raise failure
        if not text:
            raise RuntimeError(f"the layers of stage {turn} fail in forward; its own error tells why")
        found += _from_json(text)
    return found


def broadcast_text(text: str, root: int, device: torch.device, process_group: ProcessGroup) -> str:
    """The text of rank ``root`` of the group, on every rank."""
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], device=device)
    broadcast(size, root, process_group)
    if group_rank(process_group) != root:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    broadcast(data, root, process_group)
    return bytes(data.tolist()).decode().strip()


def _run(stage: StageLayers, tensors: tuple[Tensor, ...], device: torch.device) -> list[Boundary]:
    """The boundary behind each present layer."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for number in stage.present
        for module in stage.layers[number].modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    found = []
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
            for number in stage.present:
                tensors = stage.run(number, tensors)
                found.append(boundary_of(tensors))
    finally:
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                module._buffers[name] = buffer.copy_(values)
    return found


def _as_json(boundaries: Sequence[Boundary]) -> str:
    return json.dumps([[asdict(one) for one in boundary] for boundary in boundaries])


def _from_json(text: str) -> list[Boundary]:
    return [
        tuple(TensorShape(tuple(one["shape"]), one["dtype"], one["requires_grad"]) for one in boundary)
        for boundary in json.loads(text)
    ]
