"""Checkpoints of a run's pipeline: written on some stages, read on any number; see ``checkpoint_files.py``.

Tensors have the names of the undivided model (``model/layers.7.up.weight``,
``optimizer/layers.7.up.weight/exp_avg``), and every stage reads those of its own layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lm_examples import checkpoint_files
from lm_examples.checkpoint_files import loading, reader_of, write_checkpoint
from vit_examples.all_ranks import on_all_ranks
from zeroresize.pipeline import Pipeline

_LAYER = re.compile(r"(?:model|optimizer)/layers\.(\d+)\.")


@dataclass(frozen=True)
class SavedState(checkpoint_files.SavedState):
    """What of a run is no tensor of its layers.

    Attributes:
        chosen: ``pipeline.boundaries`` of the run that wrote it.
        boundaries: in force.
        balancer: None where there was none.
    """

    chosen: Any
    boundaries: tuple[int, ...]
    balancer: dict[str, Any] | None
    case: dict[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.case, dict):
            raise ValueError("case is no mapping")
        if self.balancer is not None and not isinstance(self.balancer, dict):
            raise ValueError("balancer is no mapping")
        if not isinstance(self.boundaries, list | tuple):
            raise ValueError("boundaries are no list")
        object.__setattr__(self, "boundaries", tuple(self.boundaries))


def save_checkpoint(
    folder: Path, state: SavedState, pipeline: Pipeline, optimizer: torch.optim.Optimizer, *, keep: int
) -> bool:
    """Write ``folder/step-<n>``; collective. See :func:`lm_examples.checkpoint_files.write_checkpoint`."""
    return write_checkpoint(folder, state, _contents(pipeline, optimizer), pipeline.process_group, keep=keep)


def load_layers(checkpoint: Path, pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """Fill the present layers and their optimizer state; collective.

    Raises:
        ValueError: on every rank, naming the checkpoint, if it cannot be read or lacks something.
    """
    group = pipeline.process_group

    def wanted() -> dict[str, Any]:
        return {
            name: torch.empty(one.size, dtype=one.properties.dtype) if isinstance(one, TensorStorageMetadata) else None
            for name, one in reader.read_metadata().state_dict_metadata.items()
            if _layer_of(name) in pipeline.present
        }

    def install() -> None:
        model = {name.removeprefix("model/"): one for name, one in values.items() if name.startswith("model/")}
        try:
            pipeline.load_state_dict(model)
        except RuntimeError as error:
            raise ValueError(f"{checkpoint}: {error}") from error
        parameters = dict(pipeline.named_parameters())
        for name, one in values.items():
            kind, _, rest = name.partition("/")
            if kind == "optimizer":
                parameter, _, key = rest.rpartition("/")
                optimizer.state[parameters[parameter]][key] = one

    with loading(checkpoint, group):
        reader = reader_of(checkpoint, group)
        values = on_all_ranks(ValueError, wanted, group)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load(values, storage_reader=reader, planner=planner, process_group=group)
        on_all_ranks(ValueError, install, group)


def _contents(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of the present layers, by name: tensors, and what a layer keeps besides them."""
    found = {f"model/{name}": one for name, one in pipeline.state_dict().items()}
    for name, parameter in pipeline.named_parameters():
        if _layer_of(f"model/{name}") in pipeline.present:
            state = optimizer.state.get(parameter, {})
            found |= {f"optimizer/{name}/{key}": torch.as_tensor(one) for key, one in state.items()}
    return found


def _layer_of(name: str) -> int:
    matched = _LAYER.match(name)
    return -1 if matched is None else int(matched[1])
