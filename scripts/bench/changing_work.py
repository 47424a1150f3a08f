"""The cases of changing work that the benchmarks of pipelines share, as settings of ``lm_examples.train``.

Schedules are those of the paper (DynMo, sections 3 and 4.2), squeezed into a run of a few hundred steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: Small products, so that what is measured are the sleeps; 16 blocks.
MODEL = (
    "model.num_blocks=16",
    "model.hidden_size=32",
    "model.num_heads=4",
    "model.context=64",
    "training.batch_size=8",
    "training.micro_batches=8",
    "training.log_every=10",
    "training.validation_batches=1",
)
#: Speed-ups of DynMo's Fig. 3, of dynamic balancing over the better static partition.
PAPER = {
    "pruning": "3.18",
    "freezing": "2.23",
    "early exit": "4.52",
    "mixture of depths": "1.17",
    "mixture of experts": "1.21 to 1.23",
    "sparse attention": "2.71 to 4.02",
}
_OFTEN, _RARELY = ("balance.profile_every=1", "balance.max_measuring=null"), "balance.profile_every=20"

#: Of what :func:`cells_of` shows besides the pipeline.
HEADINGS = ("step, ms", "last", "bubbles, %")

Settings = Callable[[int, int], list[str]]
#: What is written of one pipeline.
Row = dict[str, Any]


def _pruning(num_stages: int, steps: int) -> list[str]:
    every = steps // 12
    return ["case.name=pruning", *_schedule(2 * every, 6 * every, every), _RARELY]


def _freezing(num_stages: int, steps: int) -> list[str]:
    every = steps // 12
    rule = ["case.tolerance=0.7", "case.window=1", "case.patience=1", "case.keep_active=9"]
    return ["case.name=freezing", f"case.start={every}", f"case.every={every}", *rule, _RARELY]


def _early_exit(num_stages: int, steps: int) -> list[str]:
    every = steps // 12
    return ["case.name=early_exit", "case.threshold=0.98", *_schedule(2 * every, 6 * every, every), _RARELY]


def _sparse_attention(num_stages: int, steps: int) -> list[str]:
    return ["case.name=sparse_attention", "case.block_size=16", "model.context=256", *_OFTEN]


def _schedule(start: int, end: int, every: int) -> list[str]:
    return [f"case.start={start}", f"case.end={end}", f"case.every={every}"]


def _straggler(chi: float) -> Settings:
    def settings(num_stages: int, steps: int) -> list[str]:
        return [
            "case.name=none",
            f"straggler.stage={max(num_stages - 2, 0)}",
            f"straggler.chi={chi}",
            f"straggler.from_step={steps // 8}",
            _RARELY,
        ]

    return settings


CASES: dict[str, Settings] = {
    "nothing changes": lambda num_stages, steps: ["case.name=none", _RARELY],
    "χ = 2": _straggler(2.0),
    "χ = 4": _straggler(4.0),
    "pruning": _pruning,
    "freezing": _freezing,
    "early exit": _early_exit,
    "mixture of depths": lambda num_stages, steps: ["case.name=mixture_of_depths", *_OFTEN],
    "mixture of experts": lambda num_stages, steps: ["case.name=mixture_of_experts", "model.mlp_size=64", *_OFTEN],
    "sparse attention": _sparse_attention,
}


def pipelines_of(row: Row, rows: Sequence[Row]) -> list[Row]:
    """All rows of the case and the number of stages of ``row``: static pipelines first, then balanced ones."""
    return [other for other in rows if (other["case"], other["num_stages"]) == (row["case"], row["num_stages"])]


def cells_of(row: Row) -> list[str]:
    """The cells of a table for one pipeline: stages, case, variant, and what :data:`HEADINGS` say."""
    return [
        str(row["num_stages"]),
        row["case"],
        row["variant"],
        f"{1e3 * row['step_s']:.0f}",
        f"{1e3 * row['last_step_s']:.0f}",
        f"{100 * row['first_bubbles']:.0f} to {100 * row['last_bubbles']:.0f}",
    ]


def often(case: str) -> bool:
    """Whether layers are measured in every step, as the work changes in every step."""
    return _OFTEN[0] in CASES[case](2, 100)
