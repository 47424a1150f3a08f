"""The shapes of what layers hand to each other are found once, by running every layer on one micro-batch.

torch's stages can find the shapes at their own ends, but by a run of their own after every change of layers, and that
run changes buffers such as BatchNorm's statistics. With the shapes between all layers, any stage can be built anew
without running anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import broadcast, group_rank, group_size
from zeroresize.pipeline.stage_layers import StageLayers
from zeroresize.utils.torch_private import buffers_of


@dataclass(frozen=True)
class TensorShape:
    """Describes a contiguous tensor of one micro-batch between two layers.

    Attributes:
        shape: of the tensor, the samples of a micro-batch as its first dimension.
        dtype: its name without ``torch.``.
        requires_grad: whether a gradient comes back.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    def example(self, device: torch.device | str) -> Tensor:
        """Return a tensor of zeros of this shape and dtype on ``device``."""
        return torch.zeros(self.shape, dtype=getattr(torch, self.dtype), device=device).requires_grad_(
            self.requires_grad
        )


#: All tensors between two layers, before the first or behind the last one.
Boundary = tuple[TensorShape, ...]

#: How the text of a stage begins whose layers fail, and of one whose batch is refused, in place of boundaries.
_FAILED, _REFUSED = "the first forward fails in the layers", "refused: "


def boundary_of(tensors: Sequence[Tensor]) -> Boundary:
    """Return the shapes of these tensors, in their order."""
    return tuple(TensorShape(tuple(one.shape), str(one.dtype)[6:], one.requires_grad) for one in tensors)


def message_bytes(boundaries: Sequence[Boundary]) -> tuple[float, ...]:
    """Return [L + 1] bytes of a micro-batch's message at each boundary, the mean of both directions.

    All tensors of a boundary travel forward, the gradients of those that have one back.
    """
    return tuple(
        sum(tensor.num_bytes * (1 + tensor.requires_grad) for tensor in boundary) / 2 for boundary in boundaries
    )


def find_boundaries(
    stage: StageLayers, make: Callable[[], Sequence[Tensor]], device: torch.device, process_group: ProcessGroup
) -> list[Boundary]:
    """Return the boundaries before each layer and behind the last one [L + 1]; collective.

    One stage after the other runs its layers, the first one on real data, the others on zeros. Random number generators
    and buffers are as before afterwards; whatever else layers change in a forward stays changed.

    Args:
        make: returns one micro-batch, on the first stage; it may raise a ValueError.

    Raises:
        ValueError: on all ranks alike, what ``make`` raises.
        RuntimeError: on all ranks alike if a layer fails, naming it and what it raised; or if a rank does not come.
    """
    boundaries: list[Boundary] = []
    for turn in range(group_size(process_group)):
        stage_text: str = ""
        failure: Exception | None = None
        if turn == group_rank(process_group):
            try:
                tensors = tuple(one.example(device) for one in boundaries[-1]) if boundaries else tuple(make())
                before = boundary_of(tensors)
                stage_text = _as_json([*([] if boundaries else [before]), *_run(stage, tensors, device)])
            except ValueError as error:  # of make(): what layers raise is a RuntimeError
                failure, stage_text = error, f"{_REFUSED}{error}"
            except Exception as error:  # the others must hear of any
                failure, stage_text = error, f"{_FAILED} of stage {turn}: {error}"
        text = broadcast_text(stage_text, turn, device, process_group)
        if text.startswith(_FAILED):
            raise RuntimeError(text) from failure
        if text.startswith(_REFUSED):
            raise ValueError(text.removeprefix(_REFUSED)) from failure
        boundaries += _from_json(text)
    return boundaries


def broadcast_text(text: str, root: int, device: torch.device, process_group: ProcessGroup) -> str:
    """Return the text of rank ``root`` of the group, on every rank; collective.

    Args:
        device: where messages of the group must lie.
    """
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
        for name, buffer in buffers_of(module).items()
        if buffer is not None
    ]
    boundaries = []
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
            for number in stage.present:
                tensors = _called(stage, number, tensors)
                boundaries.append(boundary_of(tensors))
    finally:
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                buffers_of(module)[name] = buffer.copy_(values)
    return boundaries


def _called(stage: StageLayers, number: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    try:
        return stage.run(number, inputs)
    except Exception as error:
        given = ", ".join(f"{one.dtype} {list(one.shape)}" for one in inputs)
        raise RuntimeError(
            f"layers.{number} ({type(stage.layers[number]).__name__}), called with ({given}), raises "
            f"{type(error).__name__}: {error}. A layer of a pipeline gets what the layer before it returns and nothing "
            "else: one that wants more, such as a decoder layer of transformers, needs a module around it that makes it"
        ) from error


def _as_json(boundaries: Sequence[Boundary]) -> str:
    return json.dumps([[asdict(one) for one in boundary] for boundary in boundaries])


def _from_json(text: str) -> list[Boundary]:
    return [
        tuple(TensorShape(tuple(one["shape"]), one["dtype"], one["requires_grad"]) for one in boundary)
        for boundary in json.loads(text)
    ]
