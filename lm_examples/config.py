"""How ``lm_examples.train`` reads its configuration: which sections there are depends on what feeds the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_examples import pipeline_config
from lm_examples.microbatches import config as microbatches_config
from lm_examples.switching import config as switching_config
from vit_examples.harness.config_reader import ConfigReader
from zeroresize.utils.value_checks import one_of

#: By the key ``feed`` of a file.
KINDS: dict[str, type[Any]] = {
    "pipeline": pipeline_config.RunConfig,
    "strategies": switching_config.RunConfig,
    "microbatches": microbatches_config.RunConfig,
}


def _kind_of(document: Mapping[str, Any]) -> type[Any]:
    feed = document.get("feed", "pipeline")
    one_of("feed", feed, list(KINDS))
    return KINDS[feed]


READER = ConfigReader(
    program="lm_examples.train",
    description="Train a small language model. Keys: docs/language_models.md, strategies.md and microbatches.md.",
    kind_of=_kind_of,
    folder=Path(__file__).parent / "configs",
    default="small",
    flags={
        "case": ("case.name", str),
        "mode": ("balance.mode", str),
        "steps": ("training.steps", int),
        "data": ("data.folder", str),
        "output": ("output.folder", str),
        "seed": ("training.seed", int),
    },
    replaces={
        "case.name": (),
        "strategies.ranges": ("static", "search"),
        "strategies.static": ("ranges", "search", "optimizer_strategy"),
        "strategies.search": ("ranges", "static", "optimizer_strategy"),
    },
)
load_config = READER.load
