"""Balancing in Lightning's Trainer: BalanceCallback with ModelParallelStrategy, UnevenBatches with DDP or FSDP.

Works with both names of the library, ``lightning.pytorch`` and ``pytorch_lightning``.
"""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import zeroresize as zr
from zeroresize.comm.collectives import gather_bytes, require_group
from zeroresize.integrations.trainer_balancing import TrainerBalancing
from zeroresize.integrations.uneven_steps import UnevenSteps

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

logger = logging.getLogger(__name__)

_STRATEGY = "ModelParallelStrategy"
_OTHER_STEPS = "the optimizer does not step with the balancer: accumulate_grad_batches stays what it was in setup()"


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
        on_update, on_status: as of :class:`zeroresize.Balancer`.

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


class UnevenBatches(Callback):
    """Gives ranks samples by their speed while a Trainer fits a module in plain data parallelism; checkpoints know it.

    ``train_dataloader`` returns :meth:`batches`, and ``training_step`` :meth:`scaled` of its mean loss; see
    docs/data_parallel.md.

    Args:
        counted: returns over how many tokens a batch takes its mean loss; None for samples.
        options: of :class:`zeroresize.DataBalancer`, with ``global_batch``.

    Attributes:
        balancer: from ``setup`` on.

    Raises:
        ValueError: when training begins, for several optimizers or manual optimization, and as the balancer does.
        RuntimeError: where batches are not its own, and before a step of the optimizer without :meth:`scaled`.
    """

    def __init__(self, *, counted: Callable[[Any], Any] | None = None, **options: Any) -> None:
        self._counted, self._options, self._num_steps = counted, options, 0
        self.balancer: Any = None
        self._steps: UnevenSteps | None = None

    def batches(self, loader: Iterable[Any]) -> UnevenSteps:
        """Return what a Trainer iterates over, and divides no further, of a loader with the balancer's sampler."""
        self._steps = UnevenSteps(self.balancer, loader, self._counted, self._num_accumulated)
        return self._steps

    def scaled(self, loss: Any) -> Any:
        """Return a batch's mean loss as ``training_step`` returns it."""
        return self._present.scaled(loss)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the balancer; collective."""
        self._fits = stage == "fit"
        if self._fits:
            self._steps, self._num_accumulated = None, trainer.accumulate_grad_batches
            self.balancer = zr.DataBalancer(None, None, num_micro_batches=self._num_accumulated, **self._options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Balance the wrapped model; collective."""
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            raise ValueError("UnevenBatches with manual optimization, or several optimizers, is not allowed")
        self.balancer.attach(trainer.strategy.model, trainer.optimizers[0])
        self._num_steps = trainer.global_step

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        """Check that the optimizer steps with all of the balancer's step, scaled."""
        self._present.require_scaled()
        if not self._present.is_last:
            raise RuntimeError(_OTHER_STEPS)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """End the balancer's step with the optimizer's."""
        has_stepped, self._num_steps = trainer.global_step != self._num_steps, trainer.global_step
        if has_stepped != self._present.is_last:
            raise RuntimeError(_OTHER_STEPS)
        if has_stepped:
            self.balancer.step()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take back all hooks."""
        if self.balancer is not None:
            self.balancer.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the balancer's state, by which training goes on with the next global batch."""
        return {} if self.balancer is None else self.balancer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, in training."""
        if self._fits:
            self.balancer.load_state_dict(state_dict)

    @property
    def _present(self) -> UnevenSteps:
        if self._steps is None:
            raise RuntimeError("train_dataloader does not return batches(loader) of UnevenBatches")
        return self._steps


def _gathered(state: Mapping[str, Any]) -> dict[str, Any]:
    """The states of all ranks, whose keys name them, on rank 0; nothing on others. Tensors are on the CPU."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    everything: dict[str, Any] = {}
    for packed in gather_bytes(buffer.getvalue(), require_group(dist.group.WORLD)):
        everything |= torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    return everything
