"""What a user may ask of balancing: one frozen configuration, checked before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroresize.config.keys import (
    CHECKS,
    COMMON_WORDS,
    MIGRATING_MODES,
    MOVING_MODES,
    PINNABLE_MODES,
    checked_memory_limits,
    checked_ranks,
    checked_ratio,
    checked_share_choice,
    differentiates_layers,
    without_effect,
)
from zeroresize.config.paper import PAPER_DEFAULTS, ROOM, PaperConfig, dotted, known_paper_keys, nested, paper_config
from zeroresize.utils.value_checks import closest, keep_plain, known_keys
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
            ``"zero-pri"`` (``"zero-pridiff"`` by the paper's rule). Units move as in ``"exact"``,
            but where pruning is worth it only as far as the other ranks hardly take longer; the rest is pruned.
        ratio: ``"auto"`` decides for every straggler, by Eq. (1) where it only prunes; a number forces that ratio γ,
            0 ≤ γ < 1 where it prunes (0 prunes nothing), 0 ≤ γ ≤ 1 with ``"mig"``; with ``"exact"`` and ``"semi"``
            nothing can be forced.
        ranks: whom a forced ratio applies to: ``"stragglers"`` (as measured), ``"all"``, or ranks counted within the
            group. With ``"all"`` or a list the ratio is in force from the first iteration.
        target: the reference time of Eq. (1): the ``"mean"`` over the ranks (paper) or their ``"min"``.
        update_every: optimizer steps between two updates; an update is one exchange and one decision.
        tolerance: a rank is a straggler when its time exceeds the reference by more than this share.
        max_ratio: γ_max, the largest share that an automatic decision spares a rank; where nothing is pruned
            (``"exact"``, ``"mig"``, or ``budget`` 0) all but a few columns may be lent.
        priority: what makes a column important: its ``"activation"`` norm times its weights' norm, the ``"variation"``
            of its weights over an epoch (paper's δ), or their ``"path_length"`` over the epoch.
        ageing: what each epoch of being pruned adds to a column's priority, in means of its layer; 0 is the paper,
            where some columns may stay pruned for ever.
        pruned_update: whether the ``"optimizer"`` steps pruned columns, with a gradient of zero but with momentum and
            weight decay, or they ``"freeze"``; that needs ``paper.imputation="zero"``.
        migration_transport: how migrated columns travel: ``"broadcast-reduce"`` by collectives, merged with those that
            run anyway, or ``"scatter-gather"`` from rank to rank.
        moves: whether units may change their owner. By ``paper.semi_rule="paper"``, or with a number for
            ``paper.num_migrating``, none move, as in the paper.
        shares: how units are divided from the start: ``"even"``, one number for each rank of the group, such as
            ``(2, 1, 1)`` where rank 0 is twice as fast, or ``"auto"``, as fast as the ranks multiply before training.
            Decisions go on from there; where none moves units, as with ``moves=False`` or in the modes that only prune
            or lend, it stays so.
        memory_limits: how many bytes each rank of the group may hold in training: weights, gradients, optimizer state
            and activations; None for any number. With ``shares="even"`` training begins as near to even shares as
            leaves every rank room for activations, which are counted in the first steps. No decision gives a rank more
            than it may hold; where it holds more, units move, in the modes that move units. What kernels, and a move
            while it lasts, hold besides must find room beyond the limits.
        budget: the largest share of the group's products that an automatic decision prunes, but by
            ``paper.semi_rule="paper"``; 0 is exact.
        min_gain: what share of a step it must save to prune all of the stragglers' products, and of less in proportion:
            no automatic decision prunes what saves less, but by ``paper.semi_rule="paper"``. 0 prunes for whatever it
            saves.
        block: columns are pruned in blocks of so many neighbours; 1 is the paper.
        iters_per_epoch: if set, ``Balancer.step`` calls ``epoch_end`` itself every so many optimizer steps.
        seed: seed of the column orders.
        start_checks: whether ranks that begin with different weights, DistributedDataParallel over the group, and an
            optimizer of some of the layers are errors (the last is warned of otherwise), whether a warning tells of
            copies that drift apart later, and whether ranks compare the size of their batches wherever it changes: for
            batches of varying length a rendezvous of the hosts, some tenths of a millisecond, in every forward.
        paper: the rules and choices of the paper's methods, a :class:`PaperConfig` or a mapping of its keys.

    Raises:
        ValueError: naming the key, the value and what is allowed, or where the key is used; also for a key that does
            not exist, naming those that do.
    """

    mode: str = "exact"
    ratio: str | float = "auto"
    ranks: str | tuple[int, ...] = "stragglers"
    target: str = "min"
    update_every: int = 10
    tolerance: float = 0.1
    max_ratio: float = 0.9
    priority: str = "activation"
    ageing: float = 0.1
    pruned_update: str = "optimizer"
    migration_transport: str = "broadcast-reduce"
    moves: bool = True
    shares: str | tuple[float, ...] = "even"
    memory_limits: tuple[float, ...] | None = None
    budget: float = 0.5
    min_gain: float = 0.25
    block: int = 1
    iters_per_epoch: int | None = None
    seed: int = 0
    start_checks: bool = True
    paper: PaperConfig = field(default_factory=PaperConfig)

    def __post_init__(self) -> None:
        keep_plain(self)
        for key, check in CHECKS.items():
            check(key, getattr(self, key))
        object.__setattr__(self, "paper", paper_config(self.paper))
        object.__setattr__(self, "ratio", checked_ratio(self.ratio, self.mode))
        object.__setattr__(self, "shares", checked_share_choice(self.shares))
        object.__setattr__(self, "memory_limits", checked_memory_limits(self.memory_limits))
        object.__setattr__(self, "ranks", checked_ranks(self.ranks))
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
        if self.differentiates_layers and self.paper.pridiff_rule == "paper" and self.priority != "variation":
            raise ValueError(
                f"paper.pridiff_rule='paper' with priority={self.priority!r} is not allowed: its threshold is a change "
                "of weights, so priority must be 'variation', or paper.pridiff_rule 'budget'"
            )
        if self.pruned_update == "freeze" and self.paper.imputation != "zero":
            raise ValueError(
                f"pruned_update='freeze' with paper.imputation={self.paper.imputation!r} is not allowed: a frozen "
                "column takes no gradient, so paper.imputation must be 'zero'"
            )
        self._require_effects()

    def _require_effects(self) -> None:
        """Raise ValueError for keys that are set and have no effect, which would be passed over otherwise."""
        values = dotted(vars(self))
        ignored = [
            f"{key}={values[key]!r} has no effect with mode={self.mode!r}: it is used {where}; "
            f"leave it at {DEFAULTS[key]!r}, or choose what uses it"
            for key, where in without_effect(values).items()
            if values[key] != DEFAULTS[key]
        ]
        if ignored:
            raise ValueError("; ".join(ignored))

    @property
    def differentiates_layers(self) -> bool:
        """Whether each layer prunes a ratio of its own: ZERO-PriDiff, which is the paper's SEMI's resizer, too."""
        return differentiates_layers(dotted(vars(self)))

    @property
    def may_move(self) -> bool:
        """Whether a decision may give units of the layers to another owner."""
        is_our_rule = self.paper.semi_rule == "makespan" and self.paper.num_migrating == "auto"
        return self.mode in MOVING_MODES and self.moves and is_our_rule

    @property
    def forced_ratio(self) -> float | None:
        """The ratio a user forces, or None where it is decided from measurements."""
        return None if isinstance(self.ratio, str) else self.ratio

    def validate_group_size(self, num_ranks: int) -> None:
        """Check what can only be checked against a group of ``num_ranks`` ranks.

        Raises:
            ValueError: if ``ranks`` names a rank outside the group, or ``shares`` or ``memory_limits`` are not one for
                each.
        """
        checked_share_choice(self.shares, num_ranks)
        checked_memory_limits(self.memory_limits, num_ranks)
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
        """A copy with some keys changed, checked again; a mapping for ``paper`` changes only those keys of it."""
        return BalanceConfig.from_dict(nested(dotted(vars(self)) | dotted(changes)))

    def in_mode(self, mode: str, **changes: Any) -> BalanceConfig:
        """The same in another mode, with keys changed as by ``replace``; what has no effect there gets its default."""
        changed = dotted(changes)
        values = {**dotted(vars(self)), "mode": mode, **changed}
        idle = without_effect(values).keys() - changed.keys()
        return BalanceConfig.from_dict(nested({key: value for key, value in values.items() if key not in idle}))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BalanceConfig:
        """Build from a mapping such as a YAML section.

        Raises:
            ValueError: for a key that does not exist, naming those that do.
        """
        return cls(**known_balance_keys(values))

    @classmethod
    def from_yaml(cls, path: str | Path) -> BalanceConfig:
        """Read the ``balance:`` section of a YAML file, or the whole file if it has no such section.

        Beside the section a file may hold whatever other programs read. An empty section is written ``balance: {}``.

        Raises:
            ValueError: if the file is no mapping, holds a wrong key or value, or has a key of the section beside it or
                a section by nearly that name.
        """
        document = read_yaml(path)
        try:
            return cls.from_dict(_balance_section(document))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``from_dict`` reads back."""
        values = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    def to_flat_dict(self) -> dict[str, Any]:
        """The same with the keys as users write them on one line: those of the room as ``paper.alpha``."""
        return dotted(self.to_dict())


_FIELD_DEFAULTS = {field.name: field.default for field in dataclasses.fields(BalanceConfig)}
#: Default values by the names of the keys as users write them, such as ``paper.alpha``.
DEFAULTS: dict[str, Any] = dotted(_FIELD_DEFAULTS | {ROOM: PAPER_DEFAULTS})


def known_balance_keys(values: Any) -> Mapping[str, Any]:
    """``values``, if all its keys, and those in ``paper``, are keys of the configuration; else a ValueError."""
    known_keys("balance key", values, list(_FIELD_DEFAULTS), elsewhere=list(DEFAULTS))
    if ROOM in values and not isinstance(values[ROOM], PaperConfig):
        known_paper_keys(values[ROOM], beside=list(_FIELD_DEFAULTS))
    return values


def _balance_section(document: Any) -> Any:
    """The section ``balance``, or the whole document where it has none.

    A ValueError for what would be passed over though it is surely meant for balancing, and where no key is one of it.
    """
    if not isinstance(document, Mapping):
        return document
    for key, value in document.items():
        is_section = isinstance(key, str) and (value is None or isinstance(value, Mapping))
        if is_section and key != "balance" and closest(key.lower(), ["balance"], 0.8):
            raise ValueError(f"unknown section '{key}' (did you mean 'balance'?)")
    full_names = {name.removeprefix(f"{ROOM}."): name for name in DEFAULTS} | {name: name for name in DEFAULTS}
    if "balance" not in document:
        values = {key: value for key, value in document.items() if key != ROOM and not isinstance(value, Mapping)}
        if document and ROOM not in document and not any(closest(str(key), list(full_names)) for key in values):
            there_is = ", ".join([*map(str, document)][:6])
            raise ValueError(
                f"no section 'balance', and no key of balancing: there is {there_is}. Write the keys under "
                "'balance:', or alone in a file of their own; {} is an empty section"
            )
        return document
    for key, value in dotted(document).items():
        is_others_word = key in COMMON_WORDS and not (isinstance(value, str) and value in COMMON_WORDS[key])
        if key in full_names and not is_others_word:
            raise ValueError(
                f"the balance key '{full_names[key]}' stands beside the section 'balance', where it has no effect: "
                "move it into the section"
            )
    return document["balance"]
