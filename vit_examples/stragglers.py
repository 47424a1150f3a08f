"""Who is slow in a run, in which epoch, and how: the section ``straggler``, and what it does to this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

import zeroresize as zr
from vit_examples.contention import Contention
from zeroresize.injection.schedule import SCHEDULES, SCOPES, checked_chi, round_robin
from zeroresize.utils.value_checks import at_least, number, one_of

if TYPE_CHECKING:
    from vit_examples.run import Run

STRAGGLER_KINDS = ("none", "sleep", "contend")


@dataclass(frozen=True, kw_only=True)
class StragglerConfig:
    """Who is slow, in which epoch, and how.

    Attributes:
        kind: ``none``, ``sleep`` (after each product) or ``contend`` (χ − 1 processes that share its core).
        schedule: ``static``, or ``round_robin``: rank ``epoch mod ranks`` in each epoch.
        chi: straggling skewness χ: with ``static`` a mapping of ranks, counted within the group, to χ; with
            ``round_robin`` one number.
        scope: what is slowed: the matrix multiplications (``gemm``) or all of a product (``all``).
        pin_ratio: if set, each epoch this pruning ratio γ is pinned onto the ranks that the schedule names, and the
            others are released: a study of accuracy then does not depend on measured times, nor needs ``kind``.
        from_epoch: the first epoch, counted from 0, in which anybody is slow or pinned.
    """

    kind: str = "none"
    schedule: str = "static"
    chi: dict[int, float] | float = field(default_factory=dict)
    scope: str = "gemm"
    pin_ratio: float | None = None
    from_epoch: int = 0

    def __post_init__(self) -> None:
        at_least("straggler.from_epoch", self.from_epoch, 0)
        one_of("straggler.kind", self.kind, STRAGGLER_KINDS)
        one_of("straggler.schedule", self.schedule, SCHEDULES)
        one_of("straggler.scope", self.scope, SCOPES)
        if self.schedule == "static" and not isinstance(self.chi, dict):
            raise ValueError(f"straggler.chi={self.chi!r}: schedule 'static' needs a mapping such as {{1: 4.0}}")
        if self.schedule == "round_robin":
            number("straggler.chi (one number for schedule 'round_robin')", self.chi, least=0.0)
        if self.pin_ratio is not None:
            number("straggler.pin_ratio", self.pin_ratio, least=0.0, below=1.0)
        if (self.kind != "none" or self.pin_ratio is not None) and self.chi == {}:
            raise ValueError("straggler.chi is empty: name the ranks, for example chi: {1: 4.0}")
        if self.kind == "none" and self.pin_ratio is None and self.chi != {}:
            raise ValueError(
                f"straggler.chi={self.chi!r} with straggler.kind='none': nobody would be slow; set straggler.kind to "
                f"one of {list(STRAGGLER_KINDS[1:])} (or straggler.pin_ratio), or leave chi empty"
            )

    def chi_of(self, epoch: int, num_ranks: int) -> dict[int, float]:
        """χ of the ranks that are slow in ``epoch``."""
        if epoch < self.from_epoch:
            return {}
        return dict(self.chi) if isinstance(self.chi, dict) else dict(round_robin(float(self.chi))(epoch, num_ranks))

    def validate_group_size(self, num_ranks: int) -> None:
        """Raises ValueError for a rank outside a group of ``num_ranks``, or a χ that is not allowed."""
        try:
            checked = checked_chi(self.chi_of(self.from_epoch, num_ranks), num_ranks)
        except ValueError as error:
            raise ValueError(f"straggler.{error}") from error
        if self.kind == "contend" and not all(chi.is_integer() for chi in checked.values()):
            raise ValueError(f"straggler.chi={self.chi!r}: with straggler.kind='contend' χ is a whole number")


@contextmanager
def stragglers(run: Run) -> Iterator[Callable[[int], None]]:
    """Slow, or pin, ranks; their slowness ends with the context.

    Yields:
        ``set_epoch(epoch)``, to be called alike on every rank before each epoch.
    """
    config, host = run.config.straggler, run.host
    rank = dist.get_rank(host.tp_group)
    slowness: zr.StragglerInjector | Contention | None = None
    if config.kind == "contend":
        slowness = Contention(core_index=dist.get_rank(), device=next(host.model.parameters()).device)
    elif config.kind == "sleep":
        slowness = zr.StragglerInjector(
            host.model, process_group=host.tp_group, schedule=config.chi_of, scope=config.scope
        )

    def set_epoch(epoch: int) -> None:
        chi = config.chi_of(epoch, host.num_ranks)
        if isinstance(slowness, Contention):
            slowness.chi = max(chi.get(rank, 1.0), 1.0)
        elif slowness is not None:
            slowness.set_epoch(epoch)
        if config.pin_ratio is not None:
            run.balancer.release()
            for pinned in chi:
                run.balancer.pin(pinned, config.pin_ratio)

    with slowness or nullcontext():
        yield set_epoch
