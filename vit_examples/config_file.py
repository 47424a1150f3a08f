"""How ``vit_examples.train`` reads its configuration; see :mod:`vit_examples.harness.config_reader`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vit_examples.config import HOSTS, DataConfig, ModelConfig, OutputConfig, RunConfig, StragglerConfig, TrainingConfig
from vit_examples.harness.config_reader import ConfigReader, Flag
from zeroresize.config import BalanceConfig
from zeroresize.config.balance import DEFAULTS, known_balance_keys
from zeroresize.config.keys import MODES


def _balance_from(values: Any) -> BalanceConfig:
    known = known_balance_keys(values)
    try:
        return BalanceConfig(**known)
    except ValueError as error:  # the package's own messages begin with the bare key
        raise ValueError(f"balance.{error}") from error


READER = ConfigReader(
    program="vit_examples.train",
    description="Train a vision transformer with balanced tensor parallelism.",
    kind=RunConfig,
    sections={
        "model": ModelConfig,
        "data": DataConfig,
        "training": TrainingConfig,
        "straggler": StragglerConfig,
        "balance": BalanceConfig,
        "output": OutputConfig,
    },
    folder=Path(__file__).parent / "configs",
    default="demo",
    default_ranks=2,
    keys_are_in="vit_examples/config.py, those of balance in zeroresize/config/balance.py and paper.py",
    flags={
        "host": Flag("host", "what shards the model", choices=HOSTS),
        "mode": Flag("balance.mode", f"balance.mode: one of {', '.join(MODES)}"),
        "epochs": Flag("training.epochs", "training.epochs", int),
        "data": Flag("data.source", "data.source: mnist5k, a folder of parquet files or a data set of the hub"),
        "output": Flag("output.folder", "output.folder"),
        "seed": Flag("training.seed balance.seed", "training.seed and balance.seed", int),
    },
    read_section={"balance": _balance_from},
    inner_keys={"balance": [key for key in DEFAULTS if "." in key]},
)

load_config = READER.load
