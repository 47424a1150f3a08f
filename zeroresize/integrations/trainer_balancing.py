"""What the callbacks of trainers have in common: a balancer for one training, and visits home while a trainer saves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import zeroresize as zr

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class TrainerBalancing:
    """A mixin of callbacks: holds the balancer of a training from its begin to its end; methods are collective.

    Args:
        config, process_group, data_parallel_group, on_update, on_status: as of :class:`zeroresize.Balancer`.

    Attributes:
        balancer: while training lasts, and after it, then closed; None before.
    """

    def __init__(
        self,
        config: zr.BalanceConfig | None = None,
        *,
        process_group: ProcessGroup | DeviceMesh | None = None,
        data_parallel_group: ProcessGroup | DeviceMesh | None = None,
        on_update: Callable[[zr.UpdateRecord], None] | None = None,
        on_status: Callable[[zr.Status], object] | None = None,
    ) -> None:
        super().__init__()
        self._config = config
        self._groups: dict[str, Any] = {"process_group": process_group, "data_parallel_group": data_parallel_group}
        self._callbacks: dict[str, Any] = {"on_update": on_update, "on_status": on_status}
        self.balancer: zr.Balancer | None = None
        self._visit = ExitStack()

    @property
    def present_balancer(self) -> zr.Balancer:
        """The balancer, once training has begun."""
        assert self.balancer is not None, "training has not begun"
        return self.balancer

    def _begin(self, model: Any, optimizer: Any) -> None:
        """Make the balancer of a model as it is trained and of its optimizer; a ValueError is the balancer's."""
        if self.balancer is not None:  # of a training that broke off, perhaps
            self._end()
        self.balancer = zr.Balancer(model, optimizer, self._config, **self._groups, **self._callbacks)

    def _balance(self) -> None:
        """Balance, after a step of the optimizer."""
        self._visit.close()
        self.present_balancer.step()

    def _end_epoch(self) -> None:
        """Choose columns anew, where the configuration does not say how long an epoch is."""
        self._visit.close()
        if not self.present_balancer.config.iters_per_epoch:
            self.present_balancer.epoch_end()

    def _end(self) -> None:
        """Stop balancing, with all units at home."""
        self._visit.close()
        self.present_balancer.close(at_home=True)
