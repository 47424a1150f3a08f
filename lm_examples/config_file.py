"""A run's configuration from a YAML file and the command line; see :mod:`lm_examples.config_reader`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_examples.cases import CASES, case_class
from lm_examples.config import (
    BalanceConfig,
    CaseConfig,
    DataConfig,
    OutputConfig,
    PipelineConfig,
    RepackConfig,
    RunConfig,
    SleepConfig,
    StragglerConfig,
    TrainingConfig,
)
from lm_examples.config_reader import ConfigReader, Flag, fields_of
from lm_examples.gpt import ModelConfig
from zeroresize.utils.value_checks import known_keys, one_of


def argument_parser() -> argparse.ArgumentParser:
    """The command line of ``lm_examples.train``; a wrong argument is a ValueError."""
    where = "lm_examples/config.py, those of a case in lm_examples/cases"
    return _READER.parser("lm_examples.train", "Train a small GPT in a pipeline whose layers move.", 2, where)


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain values that ``config_from_dict`` reads back."""
    values = dataclasses.asdict(config)
    return {**values, "case": {"name": config.case.name, **values["case"]["options"]}}


def _case_from(values: Any) -> CaseConfig:
    """Options stand beside the name, and which ones there are depends on it."""
    if not isinstance(values, Mapping):
        raise ValueError(f"case={values!r}: expected a mapping such as {{name: pruning}}")
    name = values.get("name", "none")
    one_of("case.name", name, list(CASES))
    kind = case_class(name).Options
    options = dict(known_keys(f"key of case {name!r}", values, ["name", *fields_of(kind)]))
    options.pop("name", None)
    return CaseConfig(name=name, options=kind(**options))


_READER = ConfigReader(
    RunConfig,
    {
        "model": ModelConfig,
        "data": DataConfig,
        "training": TrainingConfig,
        "pipeline": PipelineConfig,
        "balance": BalanceConfig,
        "repack": RepackConfig,
        "case": CaseConfig,
        "straggler": StragglerConfig,
        "sleep": SleepConfig,
        "output": OutputConfig,
    },
    folder=Path(__file__).parent / "configs",
    default="small",
    flags={
        "case": Flag("case.name", f"case.name: one of {', '.join(CASES)}"),
        "mode": Flag("balance.mode", "balance.mode: on or off"),
        "steps": Flag("training.steps", "training.steps", int),
        "data": Flag("data.folder", "data.folder: text to train on"),
        "output": Flag("output.folder", "output.folder"),
        "seed": Flag("training.seed", "training.seed", int),
    },
    read_section={"case": _case_from},
    deciding={"case.name": "none"},
)

config_from_arguments = _READER.from_arguments
load_config = _READER.load
config_from_dict = _READER.from_dict
available_configs = _READER.available
