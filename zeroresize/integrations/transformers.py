"""BalanceCallback: balancing in transformers' Trainer, whose checkpoints stay whole."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import distribute_tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import zeroresize as zr
from zeroresize.integrations.trainer_balancing import TrainerBalancing
from zeroresize.utils.torch_private import is_dtensor

logger = logging.getLogger(__name__)

#: In a checkpoint of the Trainer: the model and its optimizer in whole tensors, and what the balancer has learned.
FOLDER = "zeroresize"

#: Models that load whole tensors.
_dividing: weakref.WeakSet[Any] = weakref.WeakSet()


class BalanceCallback(TrainerBalancing, TrainerCallback):
    """Balances a model that ``from_pretrained(tp_plan="auto")`` has split, while a Trainer trains it::

        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[BalanceCallback()])
        trainer.train()
        trainer.save_model("trained")  # by all ranks: whole tensors

    Units are at home whenever the Trainer saves, and when training has ended. Beside what the Trainer
    saves, a checkpoint gets a folder ``zeroresize`` with the model, its optimizer and the balancer's state, from which
    training goes on under any division: the Trainer's own file holds the optimizer's state of one rank only. Give this
    callback last, after those that ask the Trainer to save.

    Args:
        config: how to balance; None for the defaults.
        process_group: the tensor-parallel group, or its mesh; None for that of the model's layers.
        data_parallel_group: as of :class:`zeroresize.Balancer`.
        on_update: as of :class:`zeroresize.Balancer`.
        resume_from_checkpoint: the Trainer's checkpoint that training goes on from, where that is not the one in
            ``output_dir`` of the step at which it begins.

    Attributes:
        balancer: while training lasts, and after it, then closed; None before.

    Raises:
        ValueError: when training begins, as :class:`zeroresize.Balancer` does.
    """

    def __init__(
        self,
        config: zr.BalanceConfig | None = None,
        *,
        resume_from_checkpoint: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        self._resumes_from = resume_from_checkpoint

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the model load the whole tensors of a checkpoint that the Trainer goes on from."""
        if kwargs["model"] not in _dividing:  # another Trainer's callback may have come before
            _dividing.add(kwargs["model"])
            kwargs["model"].register_load_state_dict_pre_hook(_divide_whole_tensors)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the balancer of the optimizer as the Trainer has prepared it; collective."""
        self._begin(kwargs["model"], kwargs["optimizer"])
        if not state.global_step:
            return
        folder = Path(self._resumes_from or _checkpoint_of(args, state)) / FOLDER
        if folder.is_dir():
            dcp.load(self._state_of(kwargs), storage_reader=zr.CheckpointReader(folder))
        else:
            logger.warning(
                "training goes on from step %d, and there is no %s: the balancer begins anew, and the optimizer as the "
                "Trainer has loaded it. Pass resume_from_checkpoint= to BalanceCallback where it is elsewhere",
                state.global_step,
                folder,
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bring units back where they were, if a visit home has not ended."""
        self._visit.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Balance, after the optimizer's step; units go home where the Trainer looks at the model next."""
        self._balance()
        self._go_home_if_needed(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Choose columns anew, where the configuration does not say how long an epoch is."""
        self._end_epoch()
        self._go_home_if_needed(control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, beside what the Trainer has saved, what training goes on from."""
        self._visit.close()  # as divided now is how it goes on
        dcp.save(self._state_of(kwargs), checkpoint_id=_checkpoint_of(args, state) / FOLDER)
        self._go_home_if_needed(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop balancing, with all units at home."""
        self._end()

    def _state_of(self, trained: Mapping[str, Any]) -> dict[str, Any]:
        """What training goes on from, of what the Trainer gives to its callbacks."""
        state = {**zr.sharded_state_dict(trained["model"], trained["optimizer"]), "balancer": self.balancer}
        if trained.get("lr_scheduler") is not None:
            state["lr_scheduler"] = trained["lr_scheduler"]
        return state

    def _go_home_if_needed(self, control: Any) -> None:
        """Be at home while the Trainer saves, or loads its best model after the last step."""
        if control.should_save or control.should_training_stop:
            self._visit.enter_context(self.present_balancer.at_home())


def _divide_whole_tensors(model: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Make of whole tensors what the model's DTensors hold of them; each rank has read all."""
    for name, parameter in model.named_parameters():
        whole = state_dict.get(f"{prefix}{name}")
        if is_dtensor(parameter) and isinstance(whole, Tensor) and not is_dtensor(whole):
            state_dict[f"{prefix}{name}"] = distribute_tensor(
                whole.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
            )


def _checkpoint_of(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
