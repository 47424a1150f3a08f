"""A configuration's keys: their named values, the check of each, and where it has an effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from zeroresize.utils.value_checks import at_least, is_bool, is_number, number, one_of, share_numbers

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


def _at_least_or(key: str, value: Any, *, least: int, other: Any, otherwise: str) -> None:
    if value != other:
        at_least(key, value, least, otherwise=otherwise)


#: What each key takes whose values stay as they are given, by the name of the key; a check raises ValueError.
CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "mode": partial(one_of, allowed=MODES),
    "target": partial(one_of, allowed=TARGETS),
    "priority": partial(one_of, allowed=PRIORITIES),
    "pruned_update": partial(one_of, allowed=PRUNED_UPDATES),
    "migration_transport": partial(one_of, allowed=MIGRATION_TRANSPORTS),
    "tolerance": partial(number, least=0.0, most=10.0),
    "max_ratio": partial(number, above=0.0, below=1.0),
    "budget": partial(number, least=0.0, most=1.0),
    "min_gain": partial(number, least=0.0),
    "ageing": partial(number, least=0.0),
    "update_every": partial(at_least, least=1),
    "block": partial(at_least, least=1),
    "seed": partial(at_least, least=0),
    "moves": is_bool,
    "start_checks": is_bool,
    "iters_per_epoch": partial(_at_least_or, least=1, other=None, otherwise="null (None in Python)"),
}
PAPER_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "imputation": partial(one_of, allowed=IMPUTATIONS),
    "snapshot": partial(one_of, allowed=SNAPSHOTS),
    "pridiff_rule": partial(one_of, allowed=PRIDIFF_RULES),
    "mig_rule": partial(one_of, allowed=MIG_RULES),
    "semi_rule": partial(one_of, allowed=SEMI_RULES),
    "num_migrating": partial(_at_least_or, least=0, other="auto", otherwise="'auto'"),
    "alpha": partial(number, least=0.0, most=1.0),
    "theta_iter": partial(number, least=0.0),
}


def checked_ratio(ratio: Any, mode: str) -> str | float:
    """``"auto"``, or the ratio as a float; ValueError if it is neither, or not allowed in ``mode``."""
    may_be_one = mode in MIGRATING_MODES
    fits = is_number(ratio) and (0.0 <= ratio < 1.0 or (ratio == 1.0 and may_be_one))
    if not (fits or (isinstance(ratio, str) and ratio == "auto")):
        most = "<= 1" if may_be_one else "< 1 (at 1 nothing would be computed)"
        raise ValueError(f"ratio={ratio!r} is not allowed: 'auto' or a number with 0 <= ratio {most}")
    return ratio if isinstance(ratio, str) else float(ratio)


def checked_share_choice(shares: Any, num_ranks: int | None = None) -> str | tuple[float, ...]:
    """``"even"``, ``"auto"``, or a float for each of ``num_ranks``, of whatever sum; else a ValueError."""
    if isinstance(shares, str) and shares in SHARE_CHOICES:
        return shares
    return share_numbers(shares, num_ranks, "'even', 'auto', or ")


def checked_memory_limits(limits: Any, num_ranks: int | None = None) -> tuple[float, ...] | None:
    """None, or a number of bytes for each of ``num_ranks``, where they are known; ValueError if they are neither."""
    if limits is None:
        return None
    is_row = isinstance(limits, Sequence) and not isinstance(limits, str)
    if not is_row or not limits or not all(is_number(limit) and limit > 0 for limit in limits):
        raise ValueError(
            f"memory_limits={limits!r} is not allowed: wanted is null, or a list of bytes, one number above 0 for each "
            "rank, such as [24e9, 12e9]"
        )
    if num_ranks is not None and len(limits) != num_ranks:
        raise ValueError(
            f"memory_limits={list(limits)}: numbers of bytes for {len(limits)} ranks, and the group has {num_ranks}"
        )
    return tuple(map(float, limits))


def checked_ranks(ranks: Any) -> str | tuple[int, ...]:
    """``"stragglers"``, ``"all"``, or different ranks within the group; ValueError if they are none of these."""
    if isinstance(ranks, str) and ranks in RANK_CHOICES:
        return ranks
    is_list = isinstance(ranks, Sequence) and not isinstance(ranks, str) and len(ranks) > 0
    are_ranks = is_list and all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks)
    if not are_ranks or len(set(ranks)) != len(ranks):
        allowed = "'stragglers', 'all', or a list of different ranks counted within the group from 0"
        raise ValueError(f"ranks={ranks!r} is not allowed: {allowed}")
    return tuple(ranks)


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
    """
    if values["mode"] == "off":
        return {}
    return {key: where for key, (has_effect, where) in _USE.items() if not has_effect(values)}
