"""A segment of a model on one rank: which of its tensors hold units, and where in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from zeroresize.layers.shared_rows import SharedRows
from zeroresize.layers.splitting import Parts
from zeroresize.plan.ownership import COPY_GAIN, CopyCosts, Indices, OwnershipMap
from zeroresize.utils.checked import checked, integer

#: Takes the numbers of the units that this rank owns.
OnChange = Callable[[list[int]], object]


@checked(unit_size=integer(1), group_size=integer(1), head_size=integer(1), min_units=integer(0))
@dataclass(frozen=True)
class Segment:
    """Describes, for ``convert``, a segment that it cannot find by itself.

    Attributes:
        column: the column-parallel layers that read one replicated x, as names in the model or as modules. Empty where
            the layer of ``row`` is a whole segment (:class:`~zeroresize.integrations.HostForwardClasses`).
        row: the row-parallel layer whose y is summed.
        shared: column-parallel layers of the same x whose rows ``group_size`` neighbouring units share, as queries'
            heads share those of k and v: every rank that owns one of them holds these rows. While a group is apart such
            a layer returns a row block several times, so that each serves equally many of the rank's units, one at
            worst. Gradients of rows that several ranks hold are summed in the backward, lie on the first of these ranks
            until the optimizer's step, and are handed to the others then.
        group_size: how many units share rows of those layers.
        unit_size: how many of the row-parallel layer's input features are one unit, such as a head's size. What lies
            between the layers must treat units independently of each other: that is the user's word.
        parts: of column-parallel layers that hold several parts one after another, each with rows of every unit (q, k
            and v in one): how many equal ones, or how many features each has in the undivided layer, such as
            ``(q_rows, k_rows, v_rows)`` under grouped queries. None for those by which a layer was split, else one.
        on_change: called with the units that this rank owns, whenever that changes: their numbers among the units of
            all ranks, ascending, in the order in which the layers hold them. What lies between the layers must follow:
            counts (``attention.num_heads = len(units)``), and everything that it keeps for single units
            (``attention.slopes = slopes_of_all_heads[units]``). At even shares rank r has the r-th part of them.
        min_units: how many units every rank must keep. 0 if what lies between computes with none at all, too: it then
            divides by no count, and makes no shape of ``-1`` from nothing.
        head_size: how many output features of a column-parallel layer are one head, which no unit may cut. None for
            the ``head_dim`` or ``head_size`` of the module that holds the layers, unless ``kind`` is ``"neurons"``; 1
            where any number may be a unit.
        why_even: asked before units move away from even shares: why they may not, now; None where they may. It must
            answer alike on all ranks.
        divisible: whether several ranks may hold one unit, and each compute some tokens. Units are heads then: of x
            [B, S, K] the layer of ``column`` makes queries and those of ``shared`` keys and values, sequences are
            independent, and torch's ``scaled_dot_product_attention`` is called with queries [B, heads, S, head_size].
        extra: further parameters that belong to the units, such as attention sinks, gates, a scale for each head: their
            names in the model, or themselves; or (parameter, dim) with the dimension, 0 where none is given, that holds
            equally many rows for each unit that this rank owns, in the units' order; at even shares the rank's part.
            They travel with gradients and optimizer state, are clipped and saved as shards, and may be frozen.
        replicated: parameters between the layers that serve every unit, such as a norm of each head: while units leave
            even shares all ranks must hold the same, else nothing moves.
        kind: what a unit is, as reports name it: ``"neurons"``, ``"heads"``.
        dropouts: dropout modules between the layers, each with the dimension of its input that holds the units.
        has_other_dropout: whether something between the layers drops elements by random numbers of its own, so that
            which ones depends on the rank.

    Raises:
        ValueError: if ``column`` is no list of layers; from ``convert`` for ``extra`` that is no plain parameter of the
            model's, has other rows, or is in a parallel layer, another segment or several places.
    """

    column: Sequence[str | nn.Module]
    row: str | nn.Module
    unit_size: int = 1
    parts: Parts | None = None
    on_change: OnChange | None = None
    min_units: int = 1
    kind: str = "units"
    dropouts: Sequence[tuple[nn.Module, int]] = ()
    has_other_dropout: bool = False
    shared: Sequence[str | nn.Module] = ()
    group_size: int = 1
    head_size: int | None = None
    why_even: Callable[[], str | None] | None = None
    divisible: bool = False
    extra: Sequence[str | nn.Parameter | tuple[str | nn.Parameter, int]] = ()
    replicated: Sequence[nn.Parameter] = ()

    @property
    def layers(self) -> tuple[str | nn.Module, ...]:
        """All of its layers, the row-parallel one at last."""
        return *self.column, *self.shared, self.row


@dataclass(frozen=True)
class UnitTensor:
    """Names a parameter whose dimension ``dim`` holds this rank's units.

    Along it lie the parts, in each part all of the rank's units in ascending order, and of every unit its rows in that
    part, which are neighbours: the dimension's size is ``units × sum(rows)``.

    Attributes:
        owner, attribute: where the parameter is: ``getattr(owner, attribute)``.
        name: of the parameter in the model.
        rows: of one unit, or block of units, in each part.
        block: how many neighbouring units share rows.
        is_shared: whether it is of a layer that computes what other units need, too, such as k and v.
    """

    owner: Any
    attribute: str
    name: str
    dim: int
    rows: tuple[int, ...]
    block: int = 1
    is_shared: bool = False

    def held(self, owned: OwnershipMap, rank: int) -> Indices:
        """Return the units, or blocks of them, of which ``rank`` has rows, ascending."""
        return owned.units_of(rank) if self.block == 1 else owned.blocks_of(rank, self.block)

    @property
    def parameter(self) -> Tensor:
        parameter: Tensor = getattr(self.owner, self.attribute)
        return parameter

    @property
    def elements_of_unit(self) -> int:
        """Return how many elements belong to one unit, or block of units."""
        others = [size for dim, size in enumerate(self.parameter.shape) if dim != self.dim]
        return math.prod(others) * sum(self.rows)


def held_at_home(where: UnitTensor, owned: OwnershipMap) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many units, or blocks, each rank holds at home, and where ranks share some the first ones; else ()."""
    held = [where.held(owned.at_home, rank) for rank in range(owned.num_ranks)]
    counts = tuple(map(len, held))
    are_shared = sum(counts) * where.block > len(owned.owners)
    return counts, tuple(int(of_rank[0]) for of_rank in held) if are_shared else ()


@dataclass(eq=False)
class OwnedSegment:
    """Describes a segment as one rank holds it; the same on every rank but for what its tensors hold.

    Attributes:
        name: of the row-parallel layer, in the model.
        kind: what a unit is: ``"neurons"``, ``"heads"``, ``"KV groups"`` or ``"units"``.
        layers: names of its column- and row-parallel layers.
        tensors: what changes hands, in an order that is the same on every rank.
        copy_costs: what rows on several ranks must bring: more than sums of their gradients were measured to cost.
        quantum, min_units: as of :class:`~zeroresize.plan.ownership.SegmentWork`.
        on_change, dropouts, has_other_dropout, why_even: as of :class:`Segment`.
        replicated: where its parameters are, as (module, attribute, name in the model).
        owned: who owns which units now.
        shares: of the ranks, by which they were divided.
        has_given_shares: whether the user has said how to divide them at first, by ``convert`` or by a configuration
            that a balancer has carried out.
        stays_even: why its units stay as they are while a balancer works whose mode does not let them move; else None.
        dropout_calls: how often each keyed dropout between the layers was called in training, by its number in
            ``dropouts``, until a balancer was closed.
        modules: its layers, in the order of ``layers``.
        may_draw: whether random numbers may be drawn between the layers that are not keyed by the unit.
    """

    name: str
    kind: str
    layers: tuple[str, ...]
    tensors: tuple[UnitTensor, ...]
    owned: OwnershipMap
    quantum: int = 1
    min_units: int = 0
    copy_costs: CopyCosts = field(default_factory=lambda: CopyCosts(each_block=COPY_GAIN, any_whole=COPY_GAIN))
    on_change: OnChange | None = None
    why_even: Callable[[], str | None] | None = None
    modules: tuple[Any, ...] = field(default=(), repr=False)
    dropouts: tuple[tuple[nn.Module, int], ...] = field(default=(), repr=False)
    has_other_dropout: bool = False
    replicated: tuple[tuple[nn.Module, str, str], ...] = field(default=(), repr=False)
    shares: tuple[float, ...] = ()
    has_given_shares: bool = False
    stays_even: str | None = None
    dropout_calls: dict[int, int] = field(default_factory=dict, repr=False)
    may_draw: bool = False

    def __post_init__(self) -> None:
        self.shares = self.shares or (1.0,) * self.owned.num_ranks

    @property
    def may_give(self) -> bool:
        """Whether a rank has more units at even shares than it must keep."""
        return len(self.owned.owners) > self.min_units * self.owned.num_ranks

    @property
    def shared(self) -> list[Any]:
        """The layers whose rows several units share."""
        sharing = {id(tensor.owner) for tensor in self.tensors if tensor.is_shared and tensor.block > 1}
        return [layer for layer in self.modules if id(layer) in sharing]

    @property
    def counts(self) -> tuple[float, ...]:
        """How many units each rank owns, in wholes, such as heads: 1.5 where it computes half of one."""
        return tuple(map(self.owned.in_wholes, self.owned.counts))

    def keep_whole(self, *, blocks: bool, wholes: bool) -> None:
        """Let units that share rows change hands together, or those of a whole, or one by one; of few, as at home."""
        is_few, owned = bool(len(self.owned.at_home.apart)), self.owned
        self.quantum = owned.block if blocks and not is_few else owned.slices if blocks or wholes else 1

    @property
    def cut(self) -> list[UnitTensor]:
        """What the host has not divided so that every rank holds whole units, those of home."""
        home, ranks = self.owned.at_home, range(self.owned.num_ranks)

        def is_cut(where: UnitTensor) -> bool:
            if where.owner.moves_only:
                return False
            wanted = [len(where.held(home, rank)) * sum(where.rows) for rank in ranks]
            return wanted != [where.owner.home_shape_on(rank)[where.owner.divided_dim] for rank in ranks]

        return [where for where in self.tensors if hasattr(where.owner, "home_shape_on") and is_cut(where)]

    def follow(self, rank: int) -> None:
        """Let what lies between the layers follow what ``rank``, this one, owns now."""
        for tensor in self.tensors:
            if tensor.block > 1:
                layer, rows = tensor.owner, sum(tensor.rows)
                how = {"dim": layer.divided_dim, "are_sequences_whole": tensor.is_shared}
                layer.shared_rows = SharedRows.of(self.owned, rank, tensor.block, rows, **how)
        if self.on_change is None:
            return
        held = self.owned.blocks_of(rank, self.owned.slices).tolist()
        try:
            self.on_change(held)
        except Exception as error:
            raise RuntimeError(
                f"on_change of the segment of {self.name} failed for {len(held)} {self.kind}: "
                f"{type(error).__name__}: {error}"
            ) from error
