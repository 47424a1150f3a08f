"""Applies a run's ``straggler:`` section: injected slowness, and ratios pinned onto whom the schedule names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

import zeroresize as zr
from vit_examples.config import StragglerConfig
from vit_examples.contention import Contention
from vit_examples.host import Host


class Stragglers:
    """Who is slow in the epoch that runs; call :meth:`set_epoch` alike on every rank before each epoch.

    Args:
        slowness: an injector, or contention; None where nobody is slowed.
    """

    def __init__(
        self,
        config: StragglerConfig,
        slowness: zr.StragglerInjector | Contention | None,
        balancer: zr.Balancer,
        host: Host,
    ) -> None:
        self._config, self._slowness, self._balancer = config, slowness, balancer
        self._rank, self._num_ranks = dist.get_rank(host.tp_group), host.num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Slow, or pin, the ranks of ``epoch``."""
        if isinstance(self._slowness, Contention):
            self._slowness.chi = max(self._config.chi_of(epoch, self._num_ranks).get(self._rank, 1.0), 1.0)
        elif self._slowness is not None:
            self._slowness.set_epoch(epoch)
        if self._config.pin_ratio is not None:
            self._balancer.release()
            for rank in self._config.chi_of(epoch, self._num_ranks):
                self._balancer.pin(rank, self._config.pin_ratio)


@contextmanager
def stragglers(config: StragglerConfig, host: Host, balancer: zr.Balancer) -> Iterator[Stragglers]:
    """The run's stragglers; their slowness ends with the context."""
    if config.kind == "none":
        yield Stragglers(config, None, balancer, host)
        return
    slowness: zr.StragglerInjector | Contention
    if config.kind == "contend":
        slowness = Contention(core_index=dist.get_rank(), device=next(host.model.parameters()).device)
    else:
        slowness = zr.StragglerInjector(
            host.model, process_group=host.tp_group, schedule=config.chi_of, scope=config.scope
        )
    with slowness:
        yield Stragglers(config, slowness, balancer, host)
