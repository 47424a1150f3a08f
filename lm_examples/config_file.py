"""How ``lm_examples.train`` reads its configuration; see :mod:`vit_examples.harness.config_reader`."""

from __future__ import annotations

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
from lm_examples.gpt import ModelConfig
from vit_examples.harness.config_reader import ConfigReader, Flag, fields_of
from zeroresize.utils.value_checks import known_keys, one_of

#: Short forms of ``--set`` of a program that trains on text, step by step.
STEP_FLAGS = {
    "steps": Flag("training.steps", "training.steps", int),
    "data": Flag("data.folder", "data.folder: text to train on"),
    "output": Flag("output.folder", "output.folder"),
    "seed": Flag("training.seed", "training.seed", int),
}


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


READER = ConfigReader(
    program="lm_examples.train",
    description="Train a small GPT in a pipeline whose layers move.",
    kind=RunConfig,
    sections={
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
    default_ranks=2,
    keys_are_in="lm_examples/config.py, those of a case in lm_examples/cases",
    flags={
        "case": Flag("case.name", f"case.name: one of {', '.join(CASES)}"),
        "mode": Flag("balance.mode", "balance.mode: on or off"),
        **STEP_FLAGS,
    },
    read_section={"case": _case_from},
    deciding={"case.name": "none"},
)

load_config = READER.load
