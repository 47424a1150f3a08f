"""How ``lm_examples.train_strategies`` reads its configuration; see :mod:`vit_examples.harness.config_reader`."""

from __future__ import annotations

from pathlib import Path

from lm_examples.config import OutputConfig
from lm_examples.config_file import STEP_FLAGS
from lm_examples.documents import DocumentsConfig
from lm_examples.llama import LlamaConfig
from lm_examples.switching.config import RunConfig, StrategiesConfig, TrainingConfig
from vit_examples.harness.config_reader import ConfigReader

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
    flags=STEP_FLAGS,
    instead_of={
        "strategies.ranges": ("strategies.static", "strategies.search"),
        "strategies.static": ("strategies.ranges", "strategies.search", "strategies.optimizer_strategy"),
        "strategies.search": ("strategies.ranges", "strategies.static", "strategies.optimizer_strategy"),
    },
)

load_config = READER.load
