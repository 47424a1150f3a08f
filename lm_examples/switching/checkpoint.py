"""Checkpoints of a run: written under any strategies, read under any others; see ``checkpoint_files.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from lm_examples import checkpoint_files
from lm_examples.checkpoint_files import loading, reader_of, write_checkpoint
from lm_examples.switching.step_numbers import StepSums
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.strategy_state import strategy_state


@dataclass(frozen=True)
class SavedState(checkpoint_files.SavedState):
    """What of a run is no tensor of its model.

    Attributes:
        unwritten: the steps since the last line of ``metrics.jsonl``, as
            :meth:`~lm_examples.switching.step_numbers.StepSums.to_dict` has them.
    """

    unwritten: dict[str, Any] = field(default_factory=lambda: StepSums().to_dict())

    def __post_init__(self) -> None:
        super().__post_init__()
        StepSums.from_dict(self.unwritten)


def save_model(
    folder: Path, state: SavedState, model: SwitchableModel, optimizer: torch.optim.Optimizer, *, keep: int
) -> bool:
    """Write ``folder/step-<n>``; collective. See :func:`lm_examples.checkpoint_files.write_checkpoint`."""
    return write_checkpoint(
        folder, state, strategy_state(model, optimizer), model.process_group, keep=keep, flatten=True
    )


def load_model(checkpoint: Path, model: SwitchableModel, optimizer: torch.optim.Optimizer) -> None:
    """Fill what this rank holds of a new model, and its optimizer's state; collective.

    Raises:
        ValueError: on every rank, naming the checkpoint, if it cannot be read or lacks something.
    """
    with loading(checkpoint, model.process_group):
        reader = reader_of(checkpoint, model.process_group)
        dcp.load(strategy_state(model, optimizer), storage_reader=reader, process_group=model.process_group)
