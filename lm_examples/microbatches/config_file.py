"""How ``lm_examples.train_microbatches`` reads its configuration; see :mod:`vit_examples.harness.config_reader`."""

from __future__ import annotations

from pathlib import Path

from lm_examples.config import OutputConfig
from lm_examples.config_file import STEP_FLAGS
from lm_examples.microbatches.blocks import ModelConfig
from lm_examples.microbatches.config import (
    BalanceConfig,
    MicroBatchesConfig,
    ParallelConfig,
    RunConfig,
    SleepConfig,
    StragglerConfig,
    TasksConfig,
    TrainingConfig,
)
from vit_examples.harness.config_reader import ConfigReader

READER = ConfigReader(
    program="lm_examples.train_microbatches",
    description="Train a small GPT- or T5-like model on samples of very different lengths, in planned micro-batches.",
    kind=RunConfig,
    sections={
        "model": ModelConfig,
        "data": TasksConfig,
        "training": TrainingConfig,
        "microbatches": MicroBatchesConfig,
        "parallel": ParallelConfig,
        "balance": BalanceConfig,
        "sleep": SleepConfig,
        "straggler": StragglerConfig,
        "output": OutputConfig,
    },
    folder=Path(__file__).parent / "configs",
    default="gpt",
    default_ranks=2,
    keys_are_in="lm_examples/microbatches/config.py",
    flags=STEP_FLAGS,
)

load_config = READER.load
