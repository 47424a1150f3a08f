"""Trains mini-batches by the plans of their iterations, on replicas of a pipeline, also of divided layers (DynaPipe).

``N`` samples, ``A`` lengths of each, ``D`` replicas, ``S`` stages, ``M`` micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from zeroresize.plan.strategy import Strategy
from zeroresize.policy.microbatches.cuts import of_equal_tokens, ordered
from zeroresize.policy.microbatches.plan import Indices, IterationPlan, MicroBatch, batch_fingerprint, whole_lengths
from zeroresize.resharding.agreement import ARGUMENTS, agreed, meet_prepared
from zeroresize.runtime.activations import Batch, BatchOf
from zeroresize.runtime.counted_loss import Count, Loss, total_count
from zeroresize.runtime.stage import seed_of
from zeroresize.strategy.model import SwitchableModel, require_equal_settings, settings_of_ties, tell_ranks
from zeroresize.strategy.step_trainer import TRAINER_LIMITS, StepTrainer, require_ready_to_train, step_text
from zeroresize.strategy.switching.switcher import by_one_thread
from zeroresize.utils.checked import checked
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.texts import alike, duration_text, named_ranks
from zeroresize.utils.torch_state import seconds_when_done

#: The tokens of samples are compared between the ranks of a replica in so many iterations, and then once in so many.
_FIRST, _EVERY = 10, 1000


class MovableBatch(Batch, Protocol):
    """A micro-batch that goes to the device of the layers."""

    def to(self, device: torch.device, /) -> Batch: ...


class Plans(Protocol):
    """Where plans come from, such as :class:`~zeroresize.microbatch.planners.RunPlanners`."""

    def plan(self, iteration: int, batch: str, /) -> IterationPlan: ...


#: Makes a micro-batch from all samples of a mini-batch, and which of them it has.
BatchFrom = Callable[[Sequence[Any], MicroBatch], MovableBatch]


@dataclass(frozen=True)
class IterationReport:
    """Tells what an iteration was, the same on every rank but for its seconds.

    Attributes:
        loss: mean over all that counts in the whole mini-batch.
        num_tokens: of the last length of all samples.
        seconds: on this rank, all in all.
        wait_s: of these for the plan.
        work_s: of these in the pipeline, from this rank's first instruction to its last.
        expected_s: what was planned for the slowest replica's pipeline.
        computed_tokens: of all micro-batches, padding included.
        num_microbatches: of each replica.
        recomputation: what was computed again.
        grad_norm: of the whole model, before clipping.
        is_skipped: the loss or the norm was not finite, so the optimizer did not step.
    """

    loss: float
    num_tokens: int
    seconds: float
    wait_s: float
    work_s: float
    expected_s: float
    computed_tokens: int
    num_microbatches: tuple[int, ...]
    recomputation: str
    grad_norm: float
    is_skipped: bool

    def __str__(self) -> str:
        waited, work, expected = map(duration_text, (self.wait_s, self.work_s, self.expected_s))
        counts = "+".join(map(str, self.num_microbatches))
        return f"{step_text(self)}: {counts} micro-batches in {work}, {expected} expected, after {waited} for the plan"


@checked(tell=lambda given, error: tell_ranks(given["model"], error), **TRAINER_LIMITS)
class MicroBatchTrainer(StepTrainer):
    """Makes one optimizer step a mini-batch, in the micro-batches and the order that were planned for it.

    ::

        model = SwitchableModel(layers, strategies=[Strategy(dp=2, pp=2)])
        trainer = MicroBatchTrainer(model, optimizer, plans, batch_from=PaddedBatch.of, hollow=PaddedBatch.hollow,
                                    sizes=("size", "length"), loss=summed_loss)
        for iteration, samples in enumerate(batches):
            print(trainer.step(samples, lengths_of(samples)).loss)

    Its constructor and :meth:`step` are collective.

    Args:
        model: whose optimizer's strategy is (D, tensor-parallel ranks, S).
        optimizer: of the model's parameters.
        plans: of the iterations; planned for as many replicas and stages.
        batch_from: makes a micro-batch; every layer is called ``layer(x, batch)``.
        hollow: makes a micro-batch of given sizes, by which shapes of activations are found.
        sizes: the names of these sizes.
        loss: of the last layer's output and a micro-batch, a sum or a mean over the tokens that count; see
            :class:`~zeroresize.strategy.StrategyTrainer`.
        grad_clip: largest norm of the gradients; 0 for no clipping.
        seed: of what layers draw at random, the same on all ranks: that is a function of it, the iteration, the
            replica, the stage and the micro-batch.
        lengths_of: tokens [A] of a sample, which are compared with those that it was planned with; None for the
            function of that name beside ``batch_from``, as ``PaddedBatch`` and ``PairBatch`` have one.
        count: ``count(batch)`` tells how many tokens of a micro-batch count, for a loss that sums over those.

    Attributes:
        num_steps: how many are done, which is the number of the next iteration; set it where training is resumed.

    Raises:
        ValueError: for layers that do not run on the meta device, and an optimizer that does not step all parameters
            that want gradients, or sees whole matrices where its strategy divides them; the other ranks may raise a
            RuntimeError then.
    """

    def __init__(
        self,
        model: SwitchableModel,
        optimizer: torch.optim.Optimizer,
        plans: Plans,
        *,
        batch_from: BatchFrom,
        hollow: BatchOf,
        sizes: Sequence[str],
        loss: Loss,
        grad_clip: float = 0.0,
        seed: int = 0,
        lengths_of: Callable[[Any], Sequence[int]] | None = None,
        count: Count | None = None,
    ) -> None:
        super().__init__(
            model, optimizer, loss=loss, count=count, grad_clip=grad_clip, seed=seed, hollow=hollow, sizes=sizes
        )
        self.plans, self._batch_from, self._num_compared = plans, batch_from, 0
        self._lengths_of = lengths_of or getattr(getattr(batch_from, "__self__", None), "lengths_of", None)

    @by_one_thread
    def step(self, samples: Sequence[Any], lengths_NA: Indices) -> IterationReport:
        """Make one optimizer step; collective.

        Where the loss or the norm of the gradients is not finite, the optimizer does not step, on any rank.

        Args:
            samples: [N] of the mini-batch, the same on every rank; only those of this rank's replica are looked at.
            lengths_NA: their tokens, by which they were planned; those of the last length count where nothing else is
                known.

        Raises:
            ValueError: on all ranks for samples that are not the same on all ranks of a replica, a plan of other
                numbers of replicas and stages, and where no target counts. For samples that are more or fewer than
                their lengths, longer or shorter than one that they were planned with, a plan of other samples or
                another model, an optimizer that does not step the model's parameters, and gradients that are left; the
                other ranks raise a RuntimeError. Nothing has run then.
            RuntimeError: if there is no plan, a micro-batch cannot be made, or a rank does not come, and after a step
                that failed.
            Exception: what a layer or the loss raises. A step that fails while it runs is to be repeated from a
                checkpoint, and the process has to exit, so that the others notice.
        """
        begin = time.perf_counter()
        plan = self.fetch(samples, lengths_NA)
        return self.carry_out(plan, samples, lengths_NA, begin=begin)

    def fetch(self, samples: Sequence[Any], lengths_NA: Indices) -> IterationPlan:
        """Return the plan of the next iteration, for :meth:`carry_out`, and make its micro-batches; collective."""
        self._require_no_failure()
        try:
            batch = batch_fingerprint(lengths_NA)
        except ValueError as error:
            meet_prepared(self._meet, error, ARGUMENTS)
            raise
        plan = self.plans.plan(self.num_steps, batch)
        self._require_divided_alike(plan)
        of_replicas = [replica.microbatches for replica in plan.replicas]
        self._batches = self._agreed_batches(of_replicas, samples, lengths_NA, trains=True)
        return plan

    def carry_out(
        self, plan: IterationPlan, samples: Sequence[Any], lengths_NA: Indices, *, begin: float | None = None
    ) -> IterationReport:
        """Make one optimizer step by the plan that :meth:`fetch` has returned; collective.

        ``begin`` is when the iteration began, by ``time.perf_counter``; None for now.
        """
        planned = time.perf_counter()
        begin = planned if begin is None else begin
        wait_s = planned - begin
        position = self.model.position
        with self._running():
            work_begin = time.perf_counter()
            instructions = plan.replicas[position.replica].stages[position.stage] if position is not None else None
            parts = self._computed(self._batches, self._stage_seed(), instructions, recompute=plan.recomputation)
            work_s = seconds_when_done(self.model.device) - work_begin
            mean, norm, is_skipped, _ = self._step_optimizer(parts)
        return IterationReport(
            mean,
            int(np.asarray(lengths_NA)[:, -1].sum()),
            time.perf_counter() - begin,
            wait_s,
            work_s,
            plan.expected_s,
            sum(each.num_tokens for replica in plan.replicas for each in replica.microbatches),
            tuple(len(replica.microbatches) for replica in plan.replicas),
            plan.recomputation,
            norm,
            is_skipped,
        )

    def change_strategy(self, strategy: Strategy) -> int:
        """Spread the model otherwise from the next iteration on, with all that the optimizer keeps; collective.

        What is planned has to be planned for that, too. The model keeps the strategy before, until ``model.forget``.

        Returns:
            The bytes that this rank has received.

        Raises:
            Exception: as :meth:`~zeroresize.strategy.model.SwitchableModel.add` and ``move_optimizer``, but where the
                strategy is the present one, which does nothing; it stays as it is where memory does not suffice.
        """
        return self._change_strategies([strategy], strategy)

    def evaluate(self, samples: Sequence[Any], lengths_NA: Indices, max_tokens: int) -> float:
        """Return the mean loss over the tokens of samples that count, without gradients; collective.

        Layers are in evaluation mode meanwhile. Samples are cut into micro-batches of at most so many tokens, padding
        included, of which replicas take turns.

        Raises:
            Exception: what a layer or the loss raises.
        """
        lengths_NA = whole_lengths(lengths_NA)
        microbatches = of_equal_tokens(lengths_NA, ordered(lengths_NA), max_tokens)
        num_replicas = self.model.current.dp
        of_replicas = [microbatches[replica::num_replicas] for replica in range(num_replicas)]
        batches = self._agreed_batches(of_replicas, samples, lengths_NA, trains=False)
        self.model.drop_copies()  # the parameters may have been changed in place since
        parts = self._computed(batches, self._stage_seed())
        self.model.drop_copies()
        return self._mean(parts)[0]

    def _agreed_batches(
        self, of_replicas: Sequence[Sequence[MicroBatch]], samples: Sequence[Any], lengths_NA: Indices, *, trains: bool
    ) -> list[Batch]:
        """Make those of this rank's replica and tell all ranks what counts in them, or that one cannot; collective."""
        position = self.model.position
        microbatches = () if position is None else of_replicas[position.replica]
        wanted = [sample for each in microbatches for sample in each.samples]

        def made() -> tuple[list[Batch], list[float]]:
            if trains:
                require_ready_to_train(self.model, self.optimizer)
            self._require_planned(samples, wanted, lengths_NA)
            is_compared = self._num_compared < _FIRST or self._num_compared % _EVERY == 0
            tokens = b"".join(_tokens(samples[each]) for each in wanted) if is_compared else b""
            batches = [self._batch_from(samples, each).to(self.model.device) for each in microbatches]
            sizes = [float(np.asarray(lengths_NA)[list(each.samples), -1].sum()) for each in microbatches]
            ties = settings_of_ties(self.model, self.optimizer if trains else None)
            return batches, [self._count([(self.model.current, batches, sizes)]), fingerprint(tokens), *ties]

        (batches, _), table = agreed(self._meet, made, lambda made: made[1], what="micro-batches")
        self._num_compared += 1
        self._require_alike([row[1] for row in table])
        self._loss.begin(total_count(row[0] for row in table))
        require_equal_settings(self.model, [row[2:] for row in table])
        return batches

    def _require_planned(self, samples: Sequence[Any], wanted: Sequence[int], lengths_NA: Indices) -> None:
        """Check the lengths of this rank's samples: others would be padded, dropped or mixed."""
        if len(samples) != len(lengths_NA):
            raise ValueError(
                f"{len(samples)} samples and {len(lengths_NA)} lengths were given: give the lengths of just these "
                "samples, from which planners plan, too"
            )
        if self._lengths_of is None:
            return
        for sample in wanted:
            lengths, planned = list(self._lengths_of(samples[sample])), np.asarray(lengths_NA)[sample].tolist()
            if lengths != planned:
                raise ValueError(
                    f"sample {sample} has {lengths} tokens, and was planned with {planned}: planners and executors "
                    "have to read the same data, cut alike"
                )

    def _require_alike(self, prints: Sequence[float]) -> None:
        """Check that the ranks of a replica have the same tokens; all raise or none."""
        ranks_of: dict[int, list[int]] = {}
        for rank in range(len(prints)):
            position = self.model.current.position_of(rank)
            if position is not None:
                ranks_of.setdefault(position.replica, []).append(rank)
        for ranks in ranks_of.values():
            groups = alike([prints[rank] for rank in ranks], ranks)
            if len(groups) > 1:
                raise ValueError(
                    f"samples have other tokens on {named_ranks(groups[1])} than on {named_ranks(groups[0])}: all "
                    "ranks have to read the same data, in the same order"
                )

    def _stage_seed(self) -> int:
        position = self.model.position
        place = () if position is None else (position.replica, position.stage)
        return seed_of(self._seed, self.num_steps, *place)

    def _require_divided_alike(self, plan: IterationPlan) -> None:
        """The plan is the same on all ranks, so all raise or none."""
        strategy = self.model.optimizer_strategy
        num_stages = len(plan.replicas[0].stages)
        if (len(plan.replicas), num_stages) != (strategy.dp, strategy.pp):
            raise ValueError(
                f"iteration {plan.iteration} was planned for {len(plan.replicas)} replicas of {num_stages} stages: "
                f"the model's strategy is {strategy}"
            )


def _tokens(sample: Any) -> bytes:
    """The contents of a sample as far as it is made of tensors and arrays."""
    if isinstance(sample, Tensor):
        sample = sample.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()  # numpy has no bfloat16
    if isinstance(sample, np.ndarray):
        return sample.tobytes()
    return b"".join(map(_tokens, sample)) if isinstance(sample, tuple | list) else b""
