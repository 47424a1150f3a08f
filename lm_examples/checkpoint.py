"""Checkpoints of a run's pipeline: written on some stages, read on any number; see ``checkpoint_files.py``.

Tensors have the names of the undivided model (``model/layers.7.up.weight``,
``optimizer/layers.7.up.weight/exp_avg``), and every stage reads those of its own layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
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
from zeroresize.utils.value_checks import known_keys

_LAYER = re.compile(r"(?:model|optimizer)/layers\.(\d+)\.")


@dataclass(frozen=True)
class Unwritten:
    """What the next line of ``metrics.jsonl`` needs of steps before a checkpoint.

    Attributes:
        losses: of each step.
        seconds: of each step, on the first stage.
        slept_s: mean seconds over the stages, of all of them.

    Raises:
        ValueError: for anything else than numbers.
    """

    losses: Sequence[float] = ()
    seconds: Sequence[float] = ()
    slept_s: float = 0.0

    def __post_init__(self) -> None:
        lists = all(isinstance(one, list | tuple) for one in (self.losses, self.seconds))
        if not lists or not all(isinstance(one, int | float) for one in (*self.losses, *self.seconds, self.slept_s)):
            raise ValueError("unwritten holds something else than numbers")


@dataclass(frozen=True)
class SavedState(checkpoint_files.SavedState):
    """What of a run is no tensor of its layers.

    Attributes:
        chosen: ``pipeline.boundaries`` of the run that wrote it.
        unwritten: of the steps since the last line of ``metrics.jsonl``.
        boundaries: in force.
        balancer: None where there was none.
    """

    chosen: Any
    boundaries: tuple[int, ...]
    balancer: dict[str, Any] | None
    case: dict[str, Any]
    unwritten: Unwritten = field(default_factory=Unwritten)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.case, dict):
            raise ValueError("case is no mapping")
        if self.balancer is not None and not isinstance(self.balancer, dict):
            raise ValueError("balancer is no mapping")
        if not isinstance(self.boundaries, list | tuple):
            raise ValueError("boundaries are no list")
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        if not isinstance(self.unwritten, Unwritten):
            names = [one.name for one in fields(Unwritten)]
            object.__setattr__(self, "unwritten", Unwritten(**known_keys("key of unwritten", self.unwritten, names)))


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
