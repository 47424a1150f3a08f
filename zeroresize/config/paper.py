"""The room ``paper`` of the configuration: what only the paper's methods, and comparisons with them, ask for.

Users write its keys as ``paper.alpha``; here and in error messages they are called so, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroresize.config.keys import PAPER_CHECKS
from zeroresize.utils.value_checks import keep_plain, known_keys

ROOM = "paper"


@dataclass(frozen=True, kw_only=True)
class PaperConfig:
    """The paper's own rules and choices, where this package's default is another or the paper compares several.

    Attributes:
        semi_rule: how ``"semi"`` divides: ``"makespan"`` prunes the least that keeps a step within half the
            ``tolerance`` of the normal ranks' time, and lends the rest; ``"paper"`` follows Eq. (2) and (3), and prunes
            by ZERO-PriDiff.
        num_migrating: how many stragglers migrate in mode "semi", the slowest first (λ of Fig. 11), also where steps
            get longer by it, by the paper's rule; ``"auto"`` decides.
        mig_rule: what ``"mig"`` aims at: the time at which all ranks are ``"balanced"``, or the ``"paper"``'s Eq. (1)
            with the time of ``target``.
        pridiff_rule: ``"budget"`` prunes γ of the products between two synchronisations; ``"paper"`` prunes
            max(share of columns that moved less than θ, α γ) of each layer.
        alpha, theta_iter: α and θ of one iteration, for the paper's rule.
        snapshot: where the priority ``"variation"`` keeps its second copy of the weights: on the ``"host"``, or in
            ``"bf16"`` on the device.
        imputation: what the pruned columns of dw and dx become: ``"zero"``, the ``"average"`` of the computed columns
            row by row, or the ``"same"`` values as in the previous iteration (costs a stored copy of both).

    Raises:
        ValueError: naming the key, the value and what is allowed.
    """

    semi_rule: str = "makespan"
    num_migrating: str | int = "auto"
    mig_rule: str = "balanced"
    pridiff_rule: str = "budget"
    alpha: float = 0.8
    theta_iter: float = 1e-3
    snapshot: str = "host"
    imputation: str = "zero"

    def __post_init__(self) -> None:
        keep_plain(self)
        for key, check in PAPER_CHECKS.items():
            check(f"{ROOM}.{key}", getattr(self, key))


PAPER_DEFAULTS = {field.name: field.default for field in dataclasses.fields(PaperConfig)}


def paper_config(values: Any) -> PaperConfig:
    """The room that a user gives, as one or as a mapping; ValueError if it is neither, or has an unknown key."""
    return values if isinstance(values, PaperConfig) else PaperConfig(**known_paper_keys(values))


def known_paper_keys(values: Any, beside: Sequence[str] = ()) -> Mapping[str, Any]:
    """``values``, if it is a mapping of keys of the room; else a ValueError, which names keys ``beside`` it, too."""
    if not isinstance(values, Mapping):
        return known_keys("paper key", values, list(PAPER_DEFAULTS))
    return known_keys("balance key", values, list(PAPER_DEFAULTS), room=ROOM, elsewhere=beside)


def dotted(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """``values`` with the keys of the room beside the others: ``paper.alpha``."""
    flat: dict[Any, Any] = {}
    for key, value in values.items():
        room = vars(value) if isinstance(value, PaperConfig) else value
        if key == ROOM and isinstance(room, Mapping):
            flat |= {f"{ROOM}.{name}": entry for name, entry in room.items()}
        else:
            flat[key] = value
    return flat


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of :func:`dotted`: the keys of the room as one mapping."""
    outside = {key: value for key, value in values.items() if not key.startswith(f"{ROOM}.")}
    room = {key.removeprefix(f"{ROOM}."): value for key, value in values.items() if key not in outside}
    return {ROOM: room, **outside} if room else outside
