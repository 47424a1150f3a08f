"""BalanceCallback: balancing in Lightning's Trainer with ModelParallelStrategy, whose checkpoints stay whole.

Works with both names of the library, ``lightning.pytorch`` and ``pytorch_lightning``.
"""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import zeroresize as zr
from zeroresize.comm.collectives import gather_bytes, require_group
from zeroresize.integrations.trainer_balancing import TrainerBalancing

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

logger = logging.getLogger(__name__)

_STRATEGY = "ModelParallelStrategy"


class BalanceCallback(TrainerBalancing, Callback):
    """Balances a model that a module's ``configure_model`` has split, while a Trainer fits it::

        strategy = ModelParallelStrategy(tensor_parallel_size=2)
        trainer = Trainer(strategy=strategy, callbacks=[BalanceCallback()])
        trainer.fit(module, batches)

    The balancer is made when training begins, and steps after each step of the optimizer, however many batches that
    takes. Units are at home whenever ``trainer.save_checkpoint`` saves, as ModelCheckpoint and you call it, and when
    training has ended; after one that broke off, when the Trainer is used again. Both forms of checkpoints, distributed
    and consolidated, also hold the balancer's state, so that ``trainer.fit(..., ckpt_path=...)`` goes on as divided
    then; where the group of ranks has changed that is an error.

    Args:
        config: how to balance; None for the defaults.
        process_group: the tensor-parallel group, or its mesh; None for that of the model's layers.
        data_parallel_group: as of :class:`zeroresize.Balancer`.
        on_update: as of :class:`zeroresize.Balancer`.

    Attributes:
        balancer: while training lasts, and after it, then closed; None before.

    Raises:
        ValueError: when training begins, for another strategy than ModelParallelStrategy, for several optimizers, and
            as :class:`zeroresize.Balancer` does.
    """

    def __init__(self, config: zr.BalanceConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self._num_steps = 0
        self._loaded: dict[str, Any] | None = None
        self._to_save: dict[str, Any] = {}
        self._saving: Callable[..., None] | None = None  # in place of the Trainer's own, or of what somebody put there
        self._saved_by: Callable[..., None] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have units at home that a training has left away which broke off; collective where there was one."""
        self.teardown(trainer, pl_module, stage)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the balancer, and go on from the state in a checkpoint that was loaded; collective."""
        if _STRATEGY not in [kind.__name__ for kind in type(trainer.strategy).__mro__]:
            raise ValueError(
                f"BalanceCallback with strategy {type(trainer.strategy).__name__} is not allowed: wanted is "
                f"{_STRATEGY}, whose modules split their layers in configure_model"
            )
        if len(trainer.optimizers) != 1:
            raise ValueError(f"BalanceCallback with {len(trainer.optimizers)} optimizers is not allowed: wanted is one")
        self._begin(pl_module, trainer.optimizers[0])
        self._num_steps = trainer.global_step
        if self._loaded is not None:
            self.present_balancer.load_state_dict(self._loaded)
            self._loaded = None
        elif trainer.global_step:
            logger.warning(
                "training goes on from step %d, whose checkpoint was saved without BalanceCallback: the balancer "
                "begins anew",
                trainer.global_step,
            )
        self._saved_by = vars(trainer).get("save_checkpoint")
        self._saving = trainer.save_checkpoint = self._saving_at_home(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Balance, if the optimizer has stepped since the last call."""
        if trainer.global_step != self._num_steps:
            self._num_steps = trainer.global_step
            self._balance()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Choose columns anew, where the configuration does not say how long an epoch is."""
        self._end_epoch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop balancing, with all units at home."""
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the Trainer its own way of saving back; after a training that broke off this is not called."""
        if self._saving is not None and vars(trainer).get("save_checkpoint") is self._saving:
            del vars(trainer)["save_checkpoint"]
            if self._saved_by is not None:  # what somebody else had put there
                trainer.save_checkpoint = self._saved_by
        self._saving = self._saved_by = None
        if self.balancer is not None:
            self._end()

    def state_dict(self) -> dict[str, Any]:
        """Return the balancer's state on all ranks while the Trainer saves; on rank 0 only, which writes it."""
        return self._to_save

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until the balancer is made."""
        self._loaded = state_dict

    def _saving_at_home(self, trainer: Any) -> Callable[..., None]:
        """What is called instead of ``trainer.save_checkpoint``; collective."""
        save = trainer.save_checkpoint

        @functools.wraps(save)
        def save_checkpoint(*args: Any, **options: Any) -> None:
            balancer = self.present_balancer
            self._to_save = _gathered(balancer.state_dict())  # as divided now is how it goes on
            try:
                with balancer.at_home():
                    save(*args, **options)
            finally:
                self._to_save = {}

        return save_checkpoint


def _gathered(state: Mapping[str, Any]) -> dict[str, Any]:
    """The states of all ranks, whose keys name them, on rank 0; nothing on others. Tensors are on the CPU."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    everything: dict[str, Any] = {}
    for packed in gather_bytes(buffer.getvalue(), require_group(dist.group.WORLD)):
        everything |= torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    return everything
