"""Applies a run's ``straggler:`` section: injected slowness, and ratios pinned onto whom the schedule names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import zeroresize as zr
from vit_examples.config import StragglerConfig
from vit_examples.host import Host


class Stragglers:
    """Who is slow in the epoch that runs; call :meth:`set_epoch` alike on every rank before each epoch.

    Args:
        injector: slows products, None where nothing is injected.
    """

    def __init__(
        self, config: StragglerConfig, injector: zr.StragglerInjector | None, balancer: zr.Balancer, num_ranks: int
    ) -> None:
        self._config, self._injector, self._balancer, self._num_ranks = config, injector, balancer, num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Slow, or pin, the ranks of ``epoch``."""
        if self._injector is not None:
            self._injector.set_epoch(epoch)
        if self._config.pin_ratio is not None:
            self._balancer.release()
            for rank in self._config.chi_of(epoch, self._num_ranks):
                self._balancer.pin(rank, self._config.pin_ratio)


@contextmanager
def stragglers(config: StragglerConfig, host: Host, balancer: zr.Balancer) -> Iterator[Stragglers]:
    """The run's stragglers; their slowness ends with the context."""
    if config.kind == "none":
        yield Stragglers(config, None, balancer, host.num_ranks)
        return
    injector = zr.StragglerInjector(
        host.model, process_group=host.tp_group, schedule=config.chi_of, scope=config.scope, kind=config.kind
    )
    with injector:
        yield Stragglers(config, injector, balancer, host.num_ranks)
