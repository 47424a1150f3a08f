"""How ``lm_examples.train_strategies`` reads its configuration; see :mod:`vit_examples.harness.config_reader`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from lm_examples.config import OutputConfig
from lm_examples.documents import DocumentsConfig
from lm_examples.llama import LlamaConfig
from lm_examples.switching.config import RunConfig, StrategiesConfig, TrainingConfig
from vit_examples.harness.config_reader import ConfigReader, Flag


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Return plain values that ``config_from_dict`` reads back."""
    chosen = config.strategies
    strategies = {
        **{one.name: getattr(chosen, one.name) for one in dataclasses.fields(chosen)},
        "ranges": None if chosen.ranges is None else [one.as_dict() for one in chosen.ranges],
        "static": chosen.static and chosen.static.as_dict(),
        "optimizer_strategy": chosen.optimizer_strategy and chosen.optimizer_strategy.as_dict(),
    }
    return {**dataclasses.asdict(config), "strategies": strategies}


READER = ConfigReader(
    program="lm_examples.train_strategies",
    description="Train a small LLaMA-like model under strategies that are switched by the lengths of sequences.",
    kind=RunConfig,
    sections={
        "model": LlamaConfig,
        "data": DocumentsConfig,
        "training": TrainingConfig,
        "strategies": StrategiesConfig,
        "output": OutputConfig,
    },
    folder=Path(__file__).parent / "configs",
    default="switching",
    default_ranks=4,
    keys_are_in="lm_examples/switching/config.py",
    flags={
        "steps": Flag("training.steps", "training.steps", int),
        "data": Flag("data.folder", "data.folder: text to train on"),
        "output": Flag("output.folder", "output.folder"),
        "seed": Flag("training.seed", "training.seed", int),
    },
    instead_of={
        "strategies.ranges": ("strategies.static", "strategies.search"),
        "strategies.static": ("strategies.ranges", "strategies.search", "strategies.optimizer_strategy"),
        "strategies.search": ("strategies.ranges", "strategies.static", "strategies.optimizer_strategy"),
    },
)

argument_parser = READER.argument_parser
config_from_arguments = READER.from_arguments
load_config = READER.load
config_from_dict = READER.from_dict
available_configs = READER.available
