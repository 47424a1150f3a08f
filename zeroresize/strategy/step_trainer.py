"""What trainers of a switchable model share: the work of a stage, the loss over all ranks, the optimizer, failures."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.comm.collectives import all_reduce, message_device
from zeroresize.integrations.module_state import in_mode
from zeroresize.optim.gradient_clipping import norm_of_replicated, scale_gradients
from zeroresize.plan.strategy import Strategy
from zeroresize.resharding.agreement import make_alike, meet_over
from zeroresize.runtime.activations import Batch, BatchOf, HandedOn, find_activations
from zeroresize.runtime.counted_loss import Count, CountedLoss, Loss, multiply_gradients, total_count
from zeroresize.runtime.instructions import Instruction
from zeroresize.runtime.stage import Stage
from zeroresize.strategy.model import SwitchableModel, require_divisible
from zeroresize.strategy.switching.switch import SwitchReport
from zeroresize.utils.checked import Limit, real
from zeroresize.utils.texts import digits, duration_text
from zeroresize.utils.torch_state import synchronize

logger = logging.getLogger(__name__)


#: What is allowed for trainers besides the kinds of values.
TRAINER_LIMITS: dict[str, Limit] = {"grad_clip": real(least=0.0)}


def step_text(step: Any) -> str:
    """What reports of all kinds of steps tell in a line."""
    figures = f"loss {digits(step.loss, 4)}, {step.num_tokens} tokens, {duration_text(step.seconds)}"
    return f"{figures}, norm {digits(step.grad_norm)}{', skipped' * step.is_skipped}"


class StepTrainer:
    """Makes the steps of a trainer, which says what is computed in them. Its constructor is collective.

    Args:
        model, optimizer, loss, grad_clip, seed, count: as of a trainer.
        hollow: makes a micro-batch of given sizes, by which shapes of activations are found.
        sizes: the names of these sizes.

    Attributes:
        num_steps: how many are done.
    """

    def __init__(
        self,
        model: SwitchableModel,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Loss,
        count: Count | None,
        grad_clip: float,
        seed: int,
        hollow: BatchOf,
        sizes: Sequence[str],
    ) -> None:
        self.model, self.optimizer, self.num_steps = model, optimizer, 0
        self._loss, self._grad_clip, self._seed = CountedLoss(loss, count, averages=False), grad_clip, seed
        self._meet, self.one_thread = meet_over(model.process_group, model.device), model.one_thread
        parameters = dict(model.named_parameters())

        def checked() -> list[HandedOn]:
            require_divisible(optimizer, model.optimizer_strategy, parameters, model.tensors)
            return find_activations(model.whole_layers, hollow, sizes)

        settings = [float(grad_clip), seed]
        self._activations = make_alike(self._meet, checked, lambda _: settings, "a trainer", "grad_clip or seed")

    def _require_no_failure(self) -> None:
        if self.model.failure is not None:  # meeting the others, who may be in the midst of that step, would mix it up
            raise RuntimeError(
                f"a step failed here while it ran: {self.model.failure}. Exit this process, so that the other ranks "
                "notice, and go on from a checkpoint; only if all ranks failed alike, call model.abandon() on all"
            )

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Compute with what the parameters hold now, and remember what ends a step in its midst."""
        self.model.drop_copies()
        try:
            yield
        except BaseException as error:
            self.model.failure = f"{type(error).__name__}: {error}"
            raise

    def _count(self, visits: Iterable[tuple[Strategy, Sequence[Batch], Sequence[float]]]) -> float:
        """What counts of this rank's micro-batches under strategies; those of a replica count on one rank.

        The sizes of micro-batches count where nothing else is known.
        """
        batches, sizes, are_counted = list[Batch](), list[float](), list[bool]()
        for strategy, visited, sizes_visited in visits:
            position = strategy.position_of(self.model.rank)
            if position is not None and position.stage == strategy.pp - 1:
                batches += visited
                sizes += sizes_visited
                are_counted += [position.shard == 0] * len(visited)
        self._numbers = {id(batch): number for number, batch in enumerate(batches)}
        return sum(itertools.compress(self._loss.prepare(batches, sizes), are_counted))

    def _change_strategies(self, strategies: Iterable[Strategy], optimizer_strategy: Strategy) -> int:
        """Give the model what it lacks of these, move the optimizer, and return the bytes received; collective."""
        for strategy in dict.fromkeys(strategies):
            if strategy not in self.model.strategies:
                self.model.add(strategy)
        if optimizer_strategy == self.model.optimizer_strategy:
            return 0
        return self.model.move_optimizer(optimizer_strategy, self.optimizer).received_bytes

    def _computed(
        self,
        batches: Sequence[Batch],
        seed: int,
        instructions: Sequence[Instruction] | None = None,
        *,
        recompute: str = "none",
    ) -> Tensor:
        """Compute this rank's micro-batches, without gradients where there are no instructions.

        Returns:
            [3] of the loss, for :meth:`_mean`: the sum of this rank's parts, what they counted, and of how many
            that was not known before; of micro-batches that several ranks share, on the first of these.
        """
        model, position = self.model, self.model.position
        if position is None:
            return torch.zeros(3, dtype=torch.float64)
        self._loss.begin(self._loss.total)
        layers, pipeline = model.stage_layers, model.groups_of(model.current).pipeline
        stage = Stage(
            list(layers.values()), min(layers), self._activations, pipeline, model.device, seed, recompute=recompute
        )
        if instructions is None:
            with in_mode(nn.ModuleList(layers.values()), False):
                mean = stage.evaluate(batches, self._part_of_mean)
        else:
            mean = stage.train(instructions, batches, self._part_of_mean)
        if position.shard:
            return torch.zeros(3, dtype=torch.float64)
        if position.replica == 0:
            self._loss.warn()
        return torch.tensor([float(mean), self._loss.counted, self._loss.num_unforeseen], dtype=torch.float64)

    def _part_of_mean(self, output: Any, batch: Batch) -> Tensor:
        self._loss.number = self._numbers[id(batch)]
        part: Tensor = self._loss(output, batch)
        return part

    def _mean(self, parts: Tensor) -> tuple[float, float]:
        """Return the mean over all that counts, and by what gradients are to be multiplied; collective."""
        group = self.model.process_group
        parts = parts.to(message_device(group, self.model.device))
        all_reduce(parts, group)
        mean, counted, num_unforeseen = parts.tolist()
        factor = self._loss.total / total_count([counted]) if num_unforeseen else 1.0
        return mean * factor, factor

    def _step_optimizer(self, parts: Tensor) -> tuple[float, float, bool, SwitchReport]:
        """Collect, clip and step, unless the loss or the norm is not finite; collective.

        Args:
            parts: see :meth:`_computed`.

        Returns:
            The loss, the norm of the gradients, whether the optimizer did not step, and what collecting was.
        """
        mean, factor = self._mean(parts)
        collected = self.model.collect()
        multiply_gradients(self.model.parameters(), factor)
        norm = float(clip_grad_norm_(self.model, self._grad_clip) if self._grad_clip else grad_norm(self.model))
        is_skipped = not (math.isfinite(mean) and math.isfinite(norm))  # sums over all ranks: they decide alike
        if not is_skipped:
            self.optimizer.step()
        elif self.model.rank == 0:
            logger.warning("the optimizer does not step: the loss is %s, the norm of the gradients %s", mean, norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        synchronize(self.model.device)
        return mean, norm, is_skipped, collected


@torch.no_grad()
def grad_norm(model: SwitchableModel) -> Tensor:
    """Return the 2-norm of all gradients as one vector, on every rank, in float64; collective, behind ``collect()``.

    Each element counts once, however many ranks hold it.
    """
    dp, tp = model.optimizer_strategy.dp, model.optimizer_strategy.tp
    num_holders = {spec.name: dp if spec.division is not None else dp * tp for spec in model.tensors}
    for tie in model.ties:
        num_holders |= {model.tensors[index].name: len(tie) * dp * tp for index in tie}
    parameters = ((parameter, num_holders[name]) for name, parameter in model.named_parameters())
    return norm_of_replicated(parameters, model.process_group, model.device)


@torch.no_grad()
def clip_grad_norm_(model: SwitchableModel, max_norm: float) -> Tensor:
    """Do to the undivided model's gradients what ``torch.nn.utils.clip_grad_norm_`` does; as :func:`grad_norm`.

    Returns:
        The norm before.
    """
    norm = grad_norm(model)
    scale_gradients(list(model.parameters()), max_norm, norm)
    return norm


def require_ready_to_train(model: SwitchableModel, optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer steps the model's parameters and no others, and that no gradients are left."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = dict(model.named_parameters())
    missing = [name for name, one in parameters.items() if one.requires_grad and id(one) not in held]
    num_others = len(held - {id(parameter) for parameter in parameters.values()})
    if missing or num_others:
        raise ValueError(
            f"the optimizer does not step the parameters of its strategy {model.optimizer_strategy}: it lacks "
            f"{', '.join([f'{len(missing)} of them', *missing[:3]])}, and has {num_others} others; make it of "
            "model.parameters()"
        )
    left = [name for name, one in parameters.items() if one.grad is not None]
    if left:
        raise ValueError(
            f"{left} have gradients, to which the step's would be added: call optimizer.zero_grad() or "
            "model.abandon() before"
        )
