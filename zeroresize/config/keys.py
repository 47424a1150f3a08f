"""The named values of a configuration's keys, and where each key has an effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MODES = ("off", "exact", "zero-rd", "zero-pri", "zero-pridiff", "mig", "semi")
TARGETS = ("mean", "min")
IMPUTATIONS = ("zero", "average", "same")
RANK_CHOICES = ("stragglers", "all")

PRIORITIES = ("activation", "variation", "path_length")
SNAPSHOTS = ("host", "bf16")
PRIDIFF_RULES = ("budget", "paper")
PRUNED_UPDATES = ("optimizer", "freeze")
MIGRATION_TRANSPORTS = ("broadcast-reduce", "scatter-gather")
MIG_RULES = ("balanced", "paper")
SHARE_CHOICES = ("even", "auto")
SEMI_RULES = ("makespan", "paper")

#: Modes in which a straggler drops columns of its products (ZERO-resizing, paper section III).
PRUNING_MODES = ("zero-rd", "zero-pri", "zero-pridiff", "semi")
#: Those of them that choose the columns by a statistic.
PRIORITY_MODES = ("zero-pri", "zero-pridiff", "semi")
#: Those in which other ranks compute a straggler's columns (migration, section IV).
MIGRATING_MODES = ("exact", "mig", "semi")
#: Those in which units of the layers change their owner.
MOVING_MODES = ("exact", "semi")
#: Those in which they may, by a decision or by hand; in the others units stay as shares have divided them at the start.
MOVABLE_MODES = ("off", *MOVING_MODES)
#: Those in which one rank's ratio is its own affair.
PINNABLE_MODES = tuple(mode for mode in PRUNING_MODES if mode not in MIGRATING_MODES)

#: Values of all keys by the names that users write, such as ``paper.alpha``.
Values = Mapping[str, Any]


def differentiates_layers(values: Values) -> bool:
    """Whether each layer prunes a ratio of its own: ZERO-PriDiff, which is SEMI's resizer, too (section IV)."""
    return values["mode"] in ("zero-pridiff", "semi")


def _prunes(values: Values) -> bool:
    return values["mode"] in PRUNING_MODES


def _has_priority(values: Values) -> bool:
    return values["mode"] in PRIORITY_MODES


def _is_semi(values: Values) -> bool:
    return values["mode"] == "semi"


def _prunes_by_our_rule(values: Values) -> bool:
    by_paper = _is_semi(values) and values["paper.semi_rule"] == "paper"
    return _prunes(values) and values["ratio"] == "auto" and not by_paper


def _modes(modes: tuple[str, ...]) -> str:
    return f"in the modes {', '.join(map(repr, modes))}"


#: Keys by words that other programs use, too, with the values that are surely meant for balancing.
COMMON_WORDS: Mapping[str, tuple[str, ...]] = {
    "mode": MODES,
    "ratio": ("auto",),
    "ranks": RANK_CHOICES,
    "target": TARGETS,
    "priority": PRIORITIES,
    "snapshot": SNAPSHOTS,
    **dict.fromkeys(("alpha", "budget", "block", "seed", "paper"), ()),
}
_IN_PRIDIFF = "in the modes 'zero-pridiff', 'semi'"
#: Where a key that not all modes use has an effect, and the same in words. It follows from which way of balancing is
#: chosen, not from how much is asked for: with a budget of 0 nothing is pruned, and imputation may be set all the same.
_USE: Mapping[str, tuple[Callable[[Values], bool], str]] = {
    "paper.imputation": (_prunes, _modes(PRUNING_MODES)),
    "max_ratio": (_prunes, _modes(PRUNING_MODES)),
    "pruned_update": (_prunes, _modes(PRUNING_MODES)),
    "block": (_prunes, _modes(PRUNING_MODES)),
    "priority": (_has_priority, _modes(PRIORITY_MODES)),
    "ageing": (_has_priority, _modes(PRIORITY_MODES)),
    "paper.snapshot": (
        lambda values: _has_priority(values) and values["priority"] == "variation",
        f"{_modes(PRIORITY_MODES)}, with priority='variation'",
    ),
    "paper.pridiff_rule": (differentiates_layers, _IN_PRIDIFF),
    **dict.fromkeys(
        ("paper.alpha", "paper.theta_iter"),
        (
            lambda values: differentiates_layers(values) and values["paper.pridiff_rule"] == "paper",
            f"with paper.pridiff_rule='paper', {_IN_PRIDIFF}",
        ),
    ),
    "migration_transport": (lambda values: values["mode"] in MIGRATING_MODES, _modes(MIGRATING_MODES)),
    "paper.mig_rule": (
        lambda values: values["mode"] == "mig" and values["ratio"] == "auto",
        "in mode 'mig' with ratio='auto'",
    ),
    "moves": (lambda values: values["mode"] in MOVING_MODES, _modes(MOVING_MODES)),
    "paper.semi_rule": (_is_semi, "in mode 'semi'"),
    "paper.num_migrating": (_is_semi, "in mode 'semi'"),
    **dict.fromkeys(
        ("budget", "min_gain"),
        (
            _prunes_by_our_rule,
            f"{_modes(PINNABLE_MODES)} with ratio='auto', and in 'semi' with paper.semi_rule='makespan'",
        ),
    ),
}


def without_effect(values: Values) -> dict[str, str]:
    """Find the keys that have no effect beside these values, each with where it has one.

    In mode "off" there are none: to turn balancing off is no reason to change anything else, and it tells what the
    other modes would do.

    Args:
        values: of all keys, by the names that users write (``paper.alpha``).
    """
    if values["mode"] == "off":
        return {}
    return {key: where for key, (has_effect, where) in _USE.items() if not has_effect(values)}
