"""A run's configuration from a YAML file and the command line; see :mod:`lm_examples.config_reader`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from lm_examples.config import OutputConfig
from lm_examples.config_reader import ConfigReader, Flag
from lm_examples.documents import DocumentsConfig
from lm_examples.llama import LlamaConfig
from lm_examples.switching.config import RunConfig, StrategiesConfig, TrainingConfig

_READER = ConfigReader(
    RunConfig,
    {
        "model": LlamaConfig,
        "data": DocumentsConfig,
        "training": TrainingConfig,
        "strategies": StrategiesConfig,
        "output": OutputConfig,
    },
    folder=Path(__file__).parent / "configs",
    default="switching",
    flags={
        "steps": Flag("training.steps", "training.steps", int),
        "data": Flag("data.folder", "data.folder: text to train on"),
        "output": Flag("output.folder", "output.folder"),
        "seed": Flag("training.seed", "training.seed", int),
    },
    instead_of={
        "strategies.ranges": ("strategies.static", "strategies.search"),
        "strategies.static": ("strategies.ranges", "strategies.search", "strategies.home"),
        "strategies.search": ("strategies.ranges", "strategies.static", "strategies.home"),
    },
)

config_from_arguments = _READER.from_arguments
load_config = _READER.load
config_from_dict = _READER.from_dict
available_configs = _READER.available


def argument_parser() -> argparse.ArgumentParser:
    """The command line of ``lm_examples.train_strategies``; a wrong argument is a ValueError."""
    told = "Train a small LLaMA-like model under strategies that are switched by the lengths of sequences."
    return _READER.parser("lm_examples.train_strategies", told, 4, "lm_examples/switching/config.py")


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain values that ``config_from_dict`` reads back."""
    own = config.strategies
    strategies = {
        **{one.name: getattr(own, one.name) for one in dataclasses.fields(own)},
        "ranges": None if own.ranges is None else [one.as_dict() for one in own.ranges],
        "static": own.static and own.static.as_dict(),
        "home": own.home and own.home.as_dict(),
    }
    return {**dataclasses.asdict(config), "strategies": strategies}
