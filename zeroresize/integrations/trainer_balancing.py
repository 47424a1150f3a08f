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
    """Holds the balancer of a training from its begin to its end; all methods are collective.

    Args:
        config, process_group, data_parallel_group, on_update: as of :class:`zeroresize.Balancer`.

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
    ) -> None:
        self._config = config
        self._options: dict[str, Any] = {
            "process_group": process_group,
            "data_parallel_group": data_parallel_group,
            "on_update": on_update,
        }
        self.balancer: zr.Balancer | None = None
        self._visit = ExitStack()

    def begin(self, model: Any, optimizer: Any) -> None:
        """Make the balancer of a model as it is trained and of its optimizer.

        Raises:
            ValueError: as :class:`zeroresize.Balancer` does.
        """
        if self.balancer is not None:  # of a training that broke off, perhaps
            self.end()
        self.balancer = zr.Balancer(model, optimizer, self._config, **self._options)

    def step(self) -> None:
        """Balance, after a step of the optimizer."""
        self.come_back()
        self.present_balancer.step()

    def end_epoch(self) -> None:
        """Choose columns anew, where the configuration does not say how long an epoch is."""
        self.come_back()
        if not self.present_balancer.config.iters_per_epoch:
            self.present_balancer.epoch_end()

    def go_home(self) -> None:
        """Have all units at home until :meth:`come_back`, or until something else is called."""
        self._visit.enter_context(self.present_balancer.at_home())

    def come_back(self) -> None:
        """Bring units back where they were, if a visit home has not ended."""
        self._visit.close()

    def end(self) -> None:
        """Stop balancing, with all units at home."""
        self.come_back()
        self.present_balancer.close(at_home=True)

    @property
    def present_balancer(self) -> zr.Balancer:
        """The balancer, once training has begun."""
        assert self.balancer is not None, "training has not begun"
        return self.balancer
