"""What a user may ask of balancing: one frozen configuration, checked before anything runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODES = ("off", "zero-rd")
TARGETS = ("mean", "min")
IMPUTATIONS = ("zero", "average", "same")
RANK_CHOICES = ("stragglers", "all")

#: Modes in which a straggler drops columns of its products (ZERO-resizing, paper section III).
PRUNING_MODES = ("zero-rd",)


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How a tensor-parallel group is balanced.

    Attributes:
        mode: ``"off"`` computes everything but still measures (the paper's Baseline); ``"zero-rd"`` lets stragglers
            prune columns drawn at random (ZERO-Rd, section III-B).
        ratio: ``"auto"`` solves Eq. (1) for every straggler; a number forces that pruning ratio γ,
            0 ≤ γ < 1 (0 prunes nothing).
        ranks: whom a forced ratio applies to: ``"stragglers"`` (as measured), ``"all"``, or ranks counted within the
            group. With ``"all"`` or a list the ratio is in force from the first iteration.
        target: the reference time of Eq. (1): the ``"mean"`` over the ranks (paper) or their ``"min"``.
        imputation: what the pruned columns of dw and dx become: ``"zero"``, the ``"average"`` of the computed columns
            row by row, or the ``"same"`` values as in the previous iteration (costs a stored copy of both).
        update_every: optimizer steps between two updates; an update is one exchange and one decision.
        tolerance: a rank is a straggler when its time exceeds the reference by more than this share.
        max_ratio: the largest pruning ratio γ_max an automatic decision may choose.
        ewma: weight of the newest sample when measurements are smoothed, 0.65 to 1.
        dead_band: a change of γ smaller than this is not carried out.
        block: columns are pruned in blocks of so many neighbours; 1 is the paper.
        iters_per_epoch: if set, ``Balancer.step`` calls ``epoch_end`` itself every so many optimizer steps.
        seed: seed of the column orders.

    Raises:
        ValueError: naming the key, the value and what is allowed.
    """

    mode: str = "zero-rd"
    ratio: str | float = "auto"
    ranks: str | tuple[int, ...] = "stragglers"
    target: str = "min"
    imputation: str = "zero"
    update_every: int = 10
    tolerance: float = 0.1
    max_ratio: float = 0.9
    ewma: float = 0.7
    dead_band: float = 0.02
    block: int = 1
    iters_per_epoch: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, MODES)
        _one_of("target", self.target, TARGETS)
        _one_of("imputation", self.imputation, IMPUTATIONS)
        _in_range("tolerance", self.tolerance, 0.0, 10.0)
        _in_range("max_ratio", self.max_ratio, 0.0, 1.0, open_low=True, open_high=True)
        _in_range("ewma", self.ewma, 0.65, 1.0)
        _in_range("dead_band", self.dead_band, 0.0, 0.5)
        _at_least("update_every", self.update_every, 1)
        _at_least("block", self.block, 1)
        _at_least("seed", self.seed, 0)
        if self.iters_per_epoch is not None:
            _at_least("iters_per_epoch", self.iters_per_epoch, 1)
        object.__setattr__(self, "ratio", _checked_ratio(self.ratio))
        object.__setattr__(self, "ranks", _checked_ranks(self.ranks))
        if self.ranks != "stragglers" and self.ratio == "auto":
            raise ValueError(
                f"ranks={self.ranks!r} needs a forced ratio: set ratio to a number with 0 <= ratio < 1, "
                "or leave ranks at 'stragglers'"
            )

    @property
    def forced_ratio(self) -> float | None:
        """The pruning ratio a user forces, or None where Eq. (1) decides."""
        return None if isinstance(self.ratio, str) else self.ratio

    def validate_group_size(self, num_ranks: int) -> None:
        """Check what can only be checked against a group of ``num_ranks`` ranks.

        Raises:
            ValueError: if ``ranks`` names a rank outside the group.
        """
        if isinstance(self.ranks, tuple):
            outside = [rank for rank in self.ranks if rank >= num_ranks]
            if outside:
                raise ValueError(
                    f"ranks={list(self.ranks)} names {outside}, but the process group has {num_ranks} ranks: "
                    f"allowed are 0 to {num_ranks - 1}, counted within the group"
                )

    def replace(self, **changes: Any) -> BalanceConfig:
        """A copy with some keys changed, checked again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BalanceConfig:
        """Build from a mapping such as a YAML section.

        Raises:
            ValueError: for a key that does not exist, naming those that do.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(str(key) for key in values if key not in known)
        if unknown:
            raise ValueError(f"unknown balance keys {unknown}: allowed are {known}")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> BalanceConfig:
        """Read the ``balance:`` section of a YAML file, or the whole file if it has no such section.

        Raises:
            ValueError: if the file is no mapping or holds a wrong key or value.
        """
        import yaml

        try:
            document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not YAML: {error}") from error
        if not isinstance(document, Mapping):
            raise ValueError(f"{path}: expected a mapping of balance keys, found {type(document).__name__}")
        section = document.get("balance", document)
        if not isinstance(section, Mapping):
            raise ValueError(f"{path}: 'balance' must be a mapping, found {type(section).__name__}")
        try:
            return cls.from_dict(section)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``from_dict`` reads back."""
        values = dataclasses.asdict(self)
        if isinstance(self.ranks, tuple):
            values["ranks"] = list(self.ranks)
        return values


def _one_of(key: str, value: Any, allowed: Sequence[str]) -> None:
    if value is False and "off" in allowed:  # YAML 1.1 reads a bare `off` as false
        raise ValueError(f"{key}=False: write {key}: 'off' with quotes; allowed are {list(allowed)}")
    if value not in allowed:
        raise ValueError(f"{key}={value!r} is not allowed: choose one of {list(allowed)}")


def _is_number(value: Any) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or (
        isinstance(value, int) and not isinstance(value, bool)
    )


def _in_range(
    key: str, value: Any, low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> None:
    allowed = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    if not _is_number(value):
        raise ValueError(f"{key}={value!r} is not a finite number: allowed is {allowed}")
    below = value <= low if open_low else value < low
    above = value >= high if open_high else value > high
    if below or above:
        raise ValueError(f"{key}={value!r} is outside {allowed}")


def _at_least(key: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key}={value!r} is not allowed: a whole number of at least {least} is needed")


def _checked_ratio(ratio: Any) -> str | float:
    allowed = "'auto' or a number with 0 <= ratio < 1 (at 1 nothing would be computed)"
    if isinstance(ratio, str):
        if ratio != "auto":
            raise ValueError(f"ratio={ratio!r} is not allowed: {allowed}")
        return ratio
    if not _is_number(ratio) or not 0.0 <= ratio < 1.0:
        raise ValueError(f"ratio={ratio!r} is not allowed: {allowed}")
    return float(ratio)


def _checked_ranks(ranks: Any) -> str | tuple[int, ...]:
    allowed = "'stragglers', 'all', or a list of different ranks counted within the group from 0"
    if isinstance(ranks, str):
        if ranks not in RANK_CHOICES:
            raise ValueError(f"ranks={ranks!r} is not allowed: {allowed}")
        return ranks
    if not isinstance(ranks, Sequence) or not ranks:
        raise ValueError(f"ranks={ranks!r} is not allowed: {allowed}")
    for rank in ranks:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ValueError(f"ranks={list(ranks)} holds {rank!r}: {allowed}")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"ranks={list(ranks)} names a rank twice: {allowed}")
    return tuple(ranks)
