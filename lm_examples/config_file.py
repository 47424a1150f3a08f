"""A run's configuration from a YAML file and the command line.

``--config`` names a file of ``configs/`` or a path; ``--set section.key=value`` and the common flags change it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
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
from vit_examples.config_file import Parser, config_path, parse_override
from vit_examples.config_file import available_configs as configs_in
from zeroresize.utils.value_checks import known_keys, one_of
from zeroresize.utils.yaml_values import read_yaml

CONFIG_FOLDER = Path(__file__).parent / "configs"
SECTIONS: dict[str, Any] = {
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
}
#: Common flags and the key that each sets.
FLAGS = {
    "case": "case.name",
    "mode": "balance.mode",
    "steps": "training.steps",
    "data": "data.folder",
    "output": "output.folder",
    "seed": "training.seed",
}
_SET_HELP = (
    f"change one value, such as training.lr=0.001; may be repeated. Sections: {', '.join(SECTIONS)}. Their keys are "
    "listed in lm_examples/config.py, those of a case in lm_examples/cases"
)


def argument_parser() -> argparse.ArgumentParser:
    """The command line of ``lm_examples.train``; a wrong argument is a ValueError."""
    parser = Parser(
        prog="lm_examples.train",
        description="Train a small GPT in a pipeline whose layers move.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", default="small", help=f"{', '.join(available_configs())}, or a YAML file (small)")
    parser.add_argument("--case", help=f"case.name: one of {', '.join(CASES)}")
    parser.add_argument("--mode", help="balance.mode: on or off")
    parser.add_argument("--steps", type=int, help="training.steps")
    parser.add_argument("--data", help="data.folder: text to train on")
    parser.add_argument("--output", help="output.folder")
    parser.add_argument("--seed", type=int, help="training.seed")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=_SET_HELP)
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="check, print layers and memory of stages, no training")
    parser.add_argument("--ranks", type=int, help="stages that --dry-run assumes (2)")
    return parser


def config_from_arguments(arguments: argparse.Namespace) -> RunConfig:
    """The configuration that parsed ``arguments`` ask for.

    Raises:
        ValueError: naming the key or file that is wrong, and what is allowed.
    """
    if arguments.ranks is not None and not arguments.dry_run:
        raise ValueError("--ranks goes with --dry-run; --nproc-per-node of the launcher says how many ranks train")
    flags = [(key, getattr(arguments, flag)) for flag, key in FLAGS.items() if getattr(arguments, flag) is not None]
    return _config(arguments.config, [*flags, *map(parse_override, arguments.set)])


def load_config(name: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, or one of ``configs/`` by its bare name, and apply ``section.key=value`` overrides.

    Raises:
        ValueError: if there is no such file, or a key or value is wrong.
    """
    return _config(name, [parse_override(override) for override in overrides])


def config_from_dict(document: Any) -> RunConfig:
    """Build from plain nested mappings; unknown keys are an error that names the nearest and lists all.

    A section that is empty is as one that is missing.
    """
    values = known_keys("section", document, list(SECTIONS))
    return RunConfig(**{name: _section_from(name, own) for name, own in values.items() if own is not None})


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain values that ``config_from_dict`` reads back."""
    values = dataclasses.asdict(config)
    return {**values, "case": {"name": config.case.name, **values["case"]["options"]}}


def available_configs() -> list[str]:
    """Bare names of the files in ``configs/``."""
    return configs_in(CONFIG_FOLDER)


def _config(name: str | Path, changes: Sequence[tuple[str, Any]]) -> RunConfig:
    path = config_path(name, CONFIG_FOLDER)
    try:
        document = read_yaml(path)
    except OSError as error:
        raise ValueError(f"--config {name}: {error.strerror}") from error
    try:
        config_from_dict(document)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    for key, value in changes:
        document = _with_change(document, key, value)
    return config_from_dict(document)


def _section_from(name: str, values: Any) -> Any:
    if name == "case":
        return _case_from(values)
    section = SECTIONS[name]
    return section(**known_keys(f"{name} key", values, _fields(section)))


def _case_from(values: Any) -> CaseConfig:
    """Options stand beside the name, and which ones there are depends on it."""
    if not isinstance(values, Mapping):
        raise ValueError(f"case={values!r}: expected a mapping such as {{name: pruning}}")
    name = values.get("name", "none")
    one_of("case.name", name, list(CASES))
    kind = case_class(name).Options
    options = dict(known_keys(f"key of case {name!r}", values, ["name", *_fields(kind)]))
    options.pop("name", None)
    return CaseConfig(name=name, options=kind(**options))


def _fields(section: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(section)]


def _with_change(document: Any, key: str, value: Any) -> dict[str, Any]:
    """``document`` with one value changed."""
    section, dot, leaf = key.partition(".")
    document = dict(known_keys("section", document, list(SECTIONS)))
    if not dot:
        return {**document, section: value}
    known_keys("section", {section: None}, list(SECTIONS))
    inner = document.get(section) or {}
    if key == "case.name" and value != inner.get("name", "none"):
        inner = {}  # the options are those of another case
    return {**document, section: {**inner, leaf: value}}
