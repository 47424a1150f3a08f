"""What a user may ask of balancing: one frozen configuration, checked before anything runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from zeroresize.config_keys import (
    COMMON_WORDS,
    GONE,
    IMPUTATIONS,
    MIG_RULES,
    MIGRATING_MODES,
    MIGRATION_TRANSPORTS,
    MODES,
    MOVING_MODES,
    PINNABLE_MODES,
    PRIDIFF_RULES,
    PRIORITIES,
    PRUNED_UPDATES,
    RANK_CHOICES,
    SEMI_RULES,
    SHARE_CHOICES,
    SNAPSHOTS,
    TARGETS,
    differentiates_layers,
    without_effect,
)
from zeroresize.utils.value_checks import at_least, closest, is_bool, is_number, known_keys, number, one_of
from zeroresize.utils.yaml_values import read_yaml


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How a tensor-parallel group is balanced.

    A key that has no effect in the mode, or beside the other keys, stays at its default; in mode "off" any may be set.

    Attributes:
        mode: ``"off"`` computes everything but still measures (the paper's Baseline). With ``"exact"`` units of the
            layers change their owner where a straggler lasts, columns are lent until then, and nothing is left out.
            The others are the paper's. Stragglers prune columns: ``"zero-rd"`` drawn at random, ``"zero-pri"`` by
            priority, ``"zero-pridiff"`` by priority and with a ratio of its own for every layer (ZERO-Rd, -Pri,
            -PriDiff, sections III-B and III-C). With ``"mig"`` they hand columns to the other ranks (section IV), and
            nothing is left out. With ``"semi"`` a cost model decides who hands over and who prunes, as in
            ``"zero-pri"`` (``"zero-pridiff"`` by the paper's rule), and units move as in ``"exact"``.
        ratio: ``"auto"`` decides for every straggler, by Eq. (1) where it only prunes; a number forces that ratio γ,
            0 ≤ γ < 1 where it prunes (0 prunes nothing), 0 ≤ γ ≤ 1 with ``"mig"``; with ``"exact"`` and ``"semi"``
            nothing can be forced.
        ranks: whom a forced ratio applies to: ``"stragglers"`` (as measured), ``"all"``, or ranks counted within the
            group. With ``"all"`` or a list the ratio is in force from the first iteration.
        target: the reference time of Eq. (1): the ``"mean"`` over the ranks (paper) or their ``"min"``.
        imputation: what the pruned columns of dw and dx become: ``"zero"``, the ``"average"`` of the computed columns
            row by row, or the ``"same"`` values as in the previous iteration (costs a stored copy of both).
        update_every: optimizer steps between two updates; an update is one exchange and one decision.
        tolerance: a rank is a straggler when its time exceeds the reference by more than this share.
        max_ratio: γ_max, the largest share that an automatic decision spares a rank; where nothing is pruned
            (``"exact"``, ``"mig"``, or ``budget`` 0) all but a few columns may be lent.
        priority: what makes a column important: its ``"activation"`` norm times its weights' norm, the ``"variation"``
            of its weights over an epoch (paper's δ), or their ``"path_length"`` over the epoch.
        snapshot: where ``"variation"`` keeps its second copy of the weights: on the ``"host"``, or in ``"bf16"`` on
            the device.
        ageing: what each epoch of being pruned adds to a column's priority, in means of its layer; 0 is the paper,
            where some columns may stay pruned for ever.
        pridiff_rule: ``"budget"`` prunes γ of the products between two synchronisations; ``"paper"`` prunes
            max(share of columns that moved less than θ, α γ) of each layer.
        alpha, theta_iter: α and θ of one iteration, for the paper's rule.
        pruned_update: whether the ``"optimizer"`` steps pruned columns, with a gradient of zero but with momentum and
            weight decay, or they ``"freeze"``; that needs ``imputation="zero"``.
        migration_transport: how migrated columns travel: ``"broadcast-reduce"`` by collectives, merged with those that
            run anyway, or ``"scatter-gather"`` from rank to rank.
        mig_rule: what ``"mig"`` aims at: the time at which all ranks are ``"balanced"``, or the ``"paper"``'s Eq. (1)
            with the time of ``target``.
        moves: whether units may change their owner. While some are away from home nothing is lent or pruned. By
            ``semi_rule="paper"``, or with a number for ``num_migrating``, none move, as in the paper.
        shares: how units are divided from the start: ``"even"``, one number for each rank of the group, such as
            ``(2, 1, 1)`` where rank 0 is twice as fast or has twice the memory, or ``"auto"``, as fast as the ranks
            multiply before training. Decisions go on from there, by time alone; with ``moves=False`` it stays so.
        semi_rule: how ``"semi"`` divides: ``"makespan"`` prunes the least that keeps a step within half the
            ``tolerance`` of the normal ranks' time, and lends the rest; ``"paper"`` follows Eq. (2) and (3), and prunes
            by ZERO-PriDiff.
        num_migrating: how many stragglers migrate in mode "semi", the slowest first (λ of Fig. 11), also where steps
            get longer by it; by ``semi_rule="makespan"`` each lends a twentieth of its products at least, or none lends
            where the other ranks have too little slack for that; ``"auto"`` decides.
        budget: the largest share of the group's products that an automatic decision prunes, but by
            ``semi_rule="paper"``; 0 is exact.
        min_gain: what share of a step it must save to prune all of the stragglers' products, and of less in proportion:
            no automatic decision prunes what saves less, but by ``semi_rule="paper"``. 0 prunes for whatever it saves.
        block: columns are pruned in blocks of so many neighbours; 1 is the paper.
        iters_per_epoch: if set, ``Balancer.step`` calls ``epoch_end`` itself every so many optimizer steps.
        seed: seed of the column orders.
        start_checks: whether ranks that begin with different weights, DistributedDataParallel over the group, and an
            optimizer of some of the layers are errors (the last is warned of otherwise), whether a warning tells of
            copies that drift apart later, and whether ranks compare the size of their batches wherever it changes: for
            batches of varying length a rendezvous of the hosts, some tenths of a millisecond, in every forward.

    Raises:
        ValueError: naming the key, the value and what is allowed, or where the key is used.
    """

    mode: str = "exact"
    ratio: str | float = "auto"
    ranks: str | tuple[int, ...] = "stragglers"
    target: str = "min"
    imputation: str = "zero"
    update_every: int = 10
    tolerance: float = 0.1
    max_ratio: float = 0.9
    priority: str = "activation"
    snapshot: str = "host"
    ageing: float = 0.1
    pridiff_rule: str = "budget"
    alpha: float = 0.8
    theta_iter: float = 1e-3
    pruned_update: str = "optimizer"
    migration_transport: str = "broadcast-reduce"
    mig_rule: str = "balanced"
    moves: bool = True
    shares: str | tuple[float, ...] = "even"
    semi_rule: str = "makespan"
    num_migrating: str | int = "auto"
    budget: float = 0.5
    min_gain: float = 0.25
    block: int = 1
    iters_per_epoch: int | None = None
    seed: int = 0
    start_checks: bool = True

    def __post_init__(self) -> None:
        one_of("mode", self.mode, MODES)
        one_of("target", self.target, TARGETS)
        one_of("imputation", self.imputation, IMPUTATIONS)
        one_of("priority", self.priority, PRIORITIES)
        one_of("snapshot", self.snapshot, SNAPSHOTS)
        one_of("pridiff_rule", self.pridiff_rule, PRIDIFF_RULES)
        one_of("pruned_update", self.pruned_update, PRUNED_UPDATES)
        one_of("migration_transport", self.migration_transport, MIGRATION_TRANSPORTS)
        one_of("mig_rule", self.mig_rule, MIG_RULES)
        one_of("semi_rule", self.semi_rule, SEMI_RULES)
        if self.num_migrating != "auto":
            at_least("num_migrating", self.num_migrating, 0)
        number("tolerance", self.tolerance, least=0.0, most=10.0)
        number("max_ratio", self.max_ratio, above=0.0, below=1.0)
        number("budget", self.budget, least=0.0, most=1.0)
        number("min_gain", self.min_gain, least=0.0)
        number("ageing", self.ageing, least=0.0)
        number("alpha", self.alpha, least=0.0, most=1.0)
        number("theta_iter", self.theta_iter, least=0.0)
        at_least("update_every", self.update_every, 1)
        at_least("block", self.block, 1)
        at_least("seed", self.seed, 0)
        is_bool("moves", self.moves)
        is_bool("start_checks", self.start_checks)
        if self.iters_per_epoch is not None:
            at_least("iters_per_epoch", self.iters_per_epoch, 1)
        object.__setattr__(self, "ratio", _checked_ratio(self.ratio, self.mode))
        object.__setattr__(self, "shares", _checked_shares(self.shares))
        object.__setattr__(self, "ranks", _checked_ranks(self.ranks))
        if self.ranks != "stragglers" and self.ratio == "auto":
            raise ValueError(
                f"ranks={self.ranks!r} needs a forced ratio: set ratio to a number with 0 <= ratio < 1, "
                "or leave ranks at 'stragglers'"
            )
        if self.mode == "zero-pridiff" and self.forced_ratio is not None and self.forced_ratio > self.max_ratio:
            raise ValueError(
                f"ratio={self.ratio} exceeds max_ratio={self.max_ratio}, the most that a layer may prune in mode "
                "'zero-pridiff': lower ratio or raise max_ratio"
            )
        if self.mode in MOVING_MODES and self.ratio != "auto":
            raise ValueError(
                f"ratio={self.ratio!r} with mode={self.mode!r} is not allowed: a cost model decides, so ratio must be "
                f"'auto'. To force a ratio use mode 'mig' or one of {list(PINNABLE_MODES)}"
            )
        if self.mode in MIGRATING_MODES and self.ranks == "all":
            raise ValueError(
                f"ranks='all' with mode={self.mode!r} is not allowed: no rank would be left to compute what others lend"
            )
        if self.differentiates_layers and self.pridiff_rule == "paper" and self.priority != "variation":
            raise ValueError(
                f"pridiff_rule='paper' with priority={self.priority!r} is not allowed: its threshold is a change of "
                "weights, so priority must be 'variation', or pridiff_rule 'budget'"
            )
        if self.pruned_update == "freeze" and self.imputation != "zero":
            raise ValueError(
                f"pruned_update='freeze' with imputation={self.imputation!r} is not allowed: a frozen column takes no "
                "gradient, so imputation must be 'zero'"
            )
        self._require_effects()

    def _require_effects(self) -> None:
        """Raises ValueError for what is set and does nothing, as a wish that is passed over would."""
        defaults = _defaults()
        ignored = [
            f"{key}={vars(self)[key]!r} has no effect with mode={self.mode!r}: it is used {where}; "
            f"leave it at {defaults[key]!r}, or choose what uses it"
            for key, where in without_effect(vars(self)).items()
            if vars(self)[key] != defaults[key]
        ]
        if ignored:
            raise ValueError("; ".join(ignored))

    @property
    def differentiates_layers(self) -> bool:
        """Whether each layer prunes a ratio of its own: ZERO-PriDiff, which is the paper's SEMI's resizer, too."""
        return differentiates_layers(vars(self))

    @property
    def may_move(self) -> bool:
        """Whether a decision may give units of the layers to another owner."""
        is_our_rule = self.semi_rule == "makespan" and self.num_migrating == "auto"
        return self.mode in MOVING_MODES and self.moves and is_our_rule

    @property
    def forced_ratio(self) -> float | None:
        """The ratio a user forces, or None where it is decided from measurements."""
        return None if isinstance(self.ratio, str) else self.ratio

    def validate_group_size(self, num_ranks: int) -> None:
        """Check what can only be checked against a group of ``num_ranks`` ranks.

        Raises:
            ValueError: if ``ranks`` names a rank outside the group, or ``shares`` are not one for each.
        """
        if isinstance(self.shares, tuple) and len(self.shares) != num_ranks:
            raise ValueError(
                f"shares={list(self.shares)} has {len(self.shares)} numbers, but the process group has {num_ranks} "
                "ranks: one for each is needed"
            )
        if isinstance(self.ranks, tuple):
            outside = [rank for rank in self.ranks if rank >= num_ranks]
            if outside:
                raise ValueError(
                    f"ranks={list(self.ranks)} names {outside}, but the process group has {num_ranks} ranks: "
                    f"allowed are 0 to {num_ranks - 1}, counted within the group"
                )
            if self.mode in MIGRATING_MODES and len(self.ranks) == num_ranks > 1:
                raise ValueError(
                    f"ranks={list(self.ranks)} with mode={self.mode!r} names all {num_ranks} ranks of the process "
                    "group: at least one rank must be left to compute what the others lend"
                )

    def pinned(self, ratio: float, rank: int) -> BalanceConfig:
        """The same, but ``rank`` prunes a forced ``ratio``, as :meth:`zeroresize.Balancer.pin` has it.

        Raises:
            ValueError: for a ratio that the mode does not allow, or a mode that does not only prune.
        """
        if self.mode not in PINNABLE_MODES:
            raise ValueError(
                f"mode={self.mode!r} cannot pin a ratio: allowed are the modes that only prune, {list(PINNABLE_MODES)}"
            )
        return self.in_mode(self.mode, ratio=ratio, ranks=(rank,))

    def replace(self, **changes: Any) -> BalanceConfig:
        """A copy with some keys changed, checked again."""
        return dataclasses.replace(self, **changes)

    def in_mode(self, mode: str, **changes: Any) -> BalanceConfig:
        """The same in another mode, with some keys changed; what has no effect there returns to its default."""
        values = {**vars(self), "mode": mode}
        kept = {key: value for key, value in values.items() if key not in without_effect(values | changes)}
        return BalanceConfig(**(kept | changes))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BalanceConfig:
        """Build from a mapping such as a YAML section.

        Raises:
            ValueError: for a key that does not exist, naming those that do, or that no longer exists, saying why.
        """
        if isinstance(values, Mapping) and (gone := [key for key in GONE if key in values]):
            raise ValueError("; ".join(f"the balance key '{key}' no longer exists: {GONE[key]}" for key in gone))
        return cls(**known_keys("balance key", values, [field.name for field in dataclasses.fields(cls)]))

    @classmethod
    def from_yaml(cls, path: str | Path) -> BalanceConfig:
        """Read the ``balance:`` section of a YAML file, or the whole file if it has no such section.

        Beside the section a file may hold whatever other programs read.

        Raises:
            ValueError: if the file is no mapping, holds a wrong key or value, or has a key of the section beside it or
                a section by nearly that name.
        """
        document = read_yaml(path)
        try:
            if not isinstance(document, Mapping):
                return cls.from_dict(document)
            _require_one_section(document)
            return cls.from_dict(document.get("balance", document))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``from_dict`` reads back."""
        values = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _require_one_section(document: Mapping[Any, Any]) -> None:
    """Raises ValueError for what is passed over though it is surely meant for balancing."""
    keys = [key for key in document if isinstance(key, str)]
    known = list(_defaults())
    for key in keys:
        if (
            isinstance(document[key], Mapping | NoneType)
            and key != "balance"
            and closest(key.lower(), ["balance"], 0.8)
        ):
            raise ValueError(f"unknown section '{key}' (did you mean 'balance'?)")
    if "balance" not in document:
        return
    for key in keys:
        value = document[key]
        if key in known and (key not in COMMON_WORDS or (isinstance(value, str) and value in COMMON_WORDS[key])):
            raise ValueError(
                f"the balance key '{key}' stands beside the section 'balance', where it has no effect: move it into "
                "the section"
            )
        meant = closest(key, [one for one in known if one not in COMMON_WORDS], 0.92)
        if key not in known and meant:
            raise ValueError(
                f"the key '{key}' stands beside the section 'balance': did you mean '{meant}', within the section?"
            )


def _defaults() -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(BalanceConfig)}


def _checked_ratio(ratio: Any, mode: str) -> str | float:
    if mode in MIGRATING_MODES:
        allowed = "'auto' or a number with 0 <= ratio <= 1"
    else:
        allowed = "'auto' or a number with 0 <= ratio < 1 (at 1 nothing would be computed)"
    if isinstance(ratio, str):
        if ratio != "auto":
            raise ValueError(f"ratio={ratio!r} is not allowed: {allowed}")
        return ratio
    if not is_number(ratio) or not 0.0 <= ratio <= 1.0 or (ratio == 1.0 and mode not in MIGRATING_MODES):
        raise ValueError(f"ratio={ratio!r} is not allowed: {allowed}")
    return float(ratio)


_WANTED_SHARES = (
    "'even', 'auto', or a list of one number for each rank of the group, none negative and not all 0, such as [2, 1, 1]"
)


def _checked_shares(shares: Any) -> str | tuple[float, ...]:
    if isinstance(shares, str):
        if shares not in SHARE_CHOICES:
            raise ValueError(f"shares={shares!r} is not allowed: {_WANTED_SHARES}")
        return shares
    is_row = isinstance(shares, Sequence) and len(shares) > 0
    if not is_row or not all(is_number(share) and 0.0 <= share < math.inf for share in shares) or not any(shares):
        raise ValueError(f"shares={shares!r} is not allowed: {_WANTED_SHARES}")
    return tuple(float(share) for share in shares)


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
