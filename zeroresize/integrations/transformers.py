"""Balancing in transformers' Trainer: BalanceCallback within a split model, UnevenTrainer by batches of uneven size."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import zeroresize as zr
from zeroresize.integrations.trainer_balancing import TrainerBalancing
from zeroresize.integrations.uneven_steps import num_samples, weighed, weights
from zeroresize.utils.torch_private import is_dtensor

logger = logging.getLogger(__name__)

#: In a checkpoint of the Trainer: the model and its optimizer in whole tensors, and what the balancer has learned.
FOLDER = "zeroresize"
#: In the Trainer's state: which samples an UnevenTrainer has seen.
_BATCHES = "zeroresize.DataBalancer"

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
        on_update, on_status: as of :class:`zeroresize.Balancer`.
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


_Trainer: Any = Trainer


class UnevenTrainer(_Trainer):
    """A Trainer whose ranks are given samples by their speed; gradients are those of the whole global batch.

    It is a mixin, too: ``class Tuning(UnevenTrainer, SFTTrainer)``. Global batches are as large as ever; checkpoints
    know what was seen. ``num_items_in_batch`` is of this rank's step, as the balancer sees to the others.

    Args:
        balancing: arguments of :class:`zeroresize.DataBalancer` besides.
        lengths: of each sample, as of :meth:`zeroresize.DataBalancer.sampler`.

    Attributes:
        balancer: of the present training, or of the last one.

    Raises:
        ValueError: for samplers but at random and in order, and where a checkpoint does not say what was seen.
    """

    def __init__(self, *args: Any, balancing: Mapping[str, Any] | None = None, lengths: Any = None, **options: Any):
        super().__init__(*args, **options)
        self._balancing, self._lengths = dict(balancing or {}), lengths
        self.balancer: Any = None
        self._factors = list[Any]()  # of the micro-batches of this step whose backward is to come
        self.add_callback(_UnevenSteps(self))

    def counted(self, inputs: Mapping[str, Any]) -> Any:
        """Return over how many samples, or tokens, a micro-batch takes its mean, unless it is by num_items_in_batch."""
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor):
            return num_samples(inputs)
        return (labels[..., 1:] if getattr(self, "_loss_shifts_labels", False) else labels).ne(-100).sum()

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the Trainer's loader over this rank's samples, and begin a balancer; collective."""
        loader, args = super().get_train_dataloader(), self.args
        order = loader.batch_sampler
        while (inner := getattr(order, "batch_sampler", None) or getattr(order, "sampler", None)) is not None:
            order = inner
        if not isinstance(order, RandomSampler | SequentialSampler):
            raise ValueError(
                f"UnevenTrainer with {type(loader.dataset).__name__} sampled by {type(order).__name__} is not allowed: "
                "samples with a length, at random or in order, are; lengths= tells of different ones"
            )
        if self.balancer is not None:
            self.balancer.close()
        num_micro_batches = args.gradient_accumulation_steps
        # With split_batches Accelerate divides a batch over ranks, and else each of them has one.
        size = self._train_batch_size * num_micro_batches * (1 if self.accelerator.split_batches else args.world_size)
        self.balancer = zr.DataBalancer(
            None, None, global_batch=size, num_micro_batches=num_micro_batches, **self._balancing
        )
        seed = args.seed if args.data_seed is None else args.data_seed
        options = {"shuffle": isinstance(order, RandomSampler), "drop_last": args.dataloader_drop_last}
        self._sampler = self.balancer.sampler(loader.dataset, self._lengths, seed, **options)
        alike = ("collate_fn", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "worker_init_fn")
        kept = {name: getattr(loader, name) for name in (*alike, "multiprocessing_context")}
        return DataLoader(loader.dataset, batch_sampler=self._sampler, **kept)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Return the micro-batches of a step and what they count here, and agree on what losses weigh; collective."""
        micro_batches: list[Any] = next(self.balancer.steps(epoch_iterator), [])
        with _set(self.args, average_tokens_across_devices=False):
            _, num_items = super().get_batch_samples(iter(micro_batches), len(micro_batches), device)
        if not micro_batches:
            return micro_batches, num_items
        is_of_step = getattr(self, "loss_is_scaled_for_ga", None)  # whether losses are divided by what a step counts
        is_of_step = num_items is not None if is_of_step is None else is_of_step
        counted = list(map(self.counted, micro_batches))
        scale = self.balancer.loss_scale(sum(counted) if num_items is None or not is_of_step else num_items)
        self._factors = [scale * (1.0 if is_of_step else share) for share in weights(counted).to(scale)]
        return micro_batches, num_items if num_items is None else torch.as_tensor(num_items).clamp(min=1)

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        """Compute a micro-batch; the mean over ranks of what it returns is its part of the global batch's loss."""
        factor, backward = self._factors[0], self.accelerator.backward

        def scaled(loss: Tensor, **further: Any) -> None:
            del self._factors[0]
            backward(weighed(loss, factor), **further)

        undone = _set(self.args, average_tokens_across_devices=False, gradient_accumulation_steps=1)
        with undone, _set(self, current_gradient_accumulation_steps=1), _set(self.accelerator, backward=scaled):
            return weighed(super().training_step(*args, **options), factor)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        self.state.stateful_callbacks[_BATCHES] = self.balancer.state_dict()
        super()._save_checkpoint(*args, **options)


class _UnevenSteps(TrainerCallback):
    """Tells an UnevenTrainer's balancer when training and its steps begin and end."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, sampler = self._trainer, self._trainer._sampler
        trainer.balancer.attach(trainer.model_wrapped, trainer.optimizer)
        position = divmod(state.global_step, sampler.num_steps)
        if args.ignore_data_skip:
            sampler.set_epoch(position[0])
        elif state.global_step:
            if (saved := state.stateful_callbacks.get(_BATCHES)) is None:
                raise ValueError(
                    "the checkpoint was saved without UnevenTrainer, whose order of samples is another one"
                )
            trainer.balancer.load_state_dict(saved)
            if sampler.position != position:
                raise ValueError(f"(epoch, step) {sampler.position} were saved, and the Trainer {position}")
            sampler.repeats = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer._factors:
            raise RuntimeError("the loss of a micro-batch went to no accelerator.backward, and so was not scaled")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.balancer.step()


@contextmanager
def _set(target: Any, **values: Any) -> Iterator[None]:
    """Let attributes of an object have these values."""
    held = vars(target)
    before = {name: held[name] for name in values if name in held}
    held.update(values)
    try:
        yield
    finally:
        for name in values:
            del held[name]
        held.update(before)
