"""Training with a strategy for each range of lengths, switched inside every optimizer step (HotSPa, hot switching)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zeroresize.plan.strategy import LengthRange, Strategy, as_ranges
from zeroresize.policy.strategy.costs.cost_model import PlannedSwitches
from zeroresize.policy.strategy.packing import Visit, plan_visits
from zeroresize.policy.strategy.switches.switch_order import visiting_order
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds
from zeroresize.resharding.agreement import agreed, require_same
from zeroresize.runtime.counted_loss import Count, Loss, total_count
from zeroresize.runtime.instructions import instructions_of
from zeroresize.runtime.stage import seed_of
from zeroresize.strategy.model import SwitchableModel, require_equal_settings, settings_of_ties, tell_ranks
from zeroresize.strategy.packed import Packed, digest_of, require_sequences
from zeroresize.strategy.step_trainer import TRAINER_LIMITS, StepTrainer, require_ready_to_train, step_text
from zeroresize.strategy.switching.switch import SwitchReport
from zeroresize.strategy.switching.switcher import by_one_thread
from zeroresize.utils.checked import checked, integer
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.texts import duration_text
from zeroresize.utils.torch_state import autocast_dtype, synchronize

#: Of NVLink and InfiniBand, roughly. Orders depend on their ratio alone, and inside one node on neither.
TYPICAL_LINKS = LinkSpeeds(within_bytes_per_s=200e9, between_bytes_per_s=25e9)
#: What ranks compare before a step, in this order: the ranges' visits follow from the sequences.
_AGREED = (
    "the sequences: every rank must be given the whole mini-batch, in one order",
    "the ranges, their strategies or max_tokens",
    "step() or evaluate(), grad_clip, overlap, seed, num_steps, the optimizer's strategy or torch.autocast",
)
#: What a strategy trains in a step, with this rank's micro-batches.
_PackedVisit = tuple[Visit, list[Packed]]


@dataclass(frozen=True)
class RangeReport:
    """Tells what one strategy trained in a step: the sequences of its ranges of lengths.

    Attributes:
        up_to: of its ranges.
        num_sequences, num_tokens: of all replicas.
        num_micro_batches: of each replica.
        seconds: on this rank, without the switch to the strategy.
    """

    strategy: Strategy
    up_to: tuple[int, ...]
    num_sequences: int
    num_tokens: int
    num_micro_batches: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        return f"{self.num_sequences} sequences by {self.strategy}, {duration_text(self.seconds)}"


@dataclass(frozen=True)
class StepReport:
    """Tells what an optimizer's step computed and how long it took.

    Attributes:
        loss: mean over the tokens of the whole mini-batch, the same on every rank.
        num_tokens: of it, to be predicted.
        seconds: on this rank.
        by_range: in the order in which the strategies were visited.
        switches: to each of them that was not in force, and the optimizer's strategy; as this rank saw them.
        grad_norm: of the whole model, before clipping.
        is_skipped: the loss or the norm was not finite, so the optimizer did not step.
    """

    loss: float
    num_tokens: int
    seconds: float
    by_range: tuple[RangeReport, ...]
    switches: tuple[SwitchReport, ...]
    grad_norm: float
    is_skipped: bool = False

    def __str__(self) -> str:
        switched = duration_text(sum(switch.seconds for switch in self.switches))
        return f"{step_text(self)}: {'; '.join(map(str, self.by_range))}; {switched} for {len(self.switches)} switches"


@checked(tell=lambda given, error: tell_ranks(given["model"], error), **TRAINER_LIMITS, max_tokens=integer(1))
class StrategyTrainer(StepTrainer):
    """Trains sequences of each range of lengths under the range's strategy, and steps the optimizer once for all.

    ::

        ranges = [LengthRange(1024, Strategy(dp=4)), LengthRange(8192, Strategy(tp=4))]
        model = SwitchableModel(layers, strategies=[one.strategy for one in ranges])
        optimizer = torch.optim.AdamW(model.parameters())
        trainer = StrategyTrainer(model, optimizer, ranges, loss=token_loss, max_tokens=8192)
        for sequences in batches:
            print(trainer.step(sequences).loss)

    A step visits each strategy that has sequences once, in the order whose switches take least (a travelling
    salesman's tour from the optimizer's strategy and back). The sequences of a visit are packed into micro-batches,
    replica by replica, and run in 1F1B. A token counts the same under every strategy, so the step is that of training
    under one of them.

    Its constructor is collective.

    Args:
        model: under the optimizer's strategy between steps. A rank that a strategy leaves out takes part in the
            switches.
        optimizer: of the model's parameters; after ``model.move_optimizer`` of those that it has then. On a rank the
            optimizer's strategy leaves out, of none: ``AdamW([{"params": []}])``.
        ranges: rising, each with one of the model's strategies.
        loss: ``loss(output of the last layer, packed)``, a sum or a mean over the tokens that count. Which do is known
            of torch's losses, such as ``cross_entropy`` with its ``ignore_index`` and ``weight``, as far as ``packed``
            tells; where only the loss knows, it returns (sum, count). Other numbers are taken for sums over all
            tokens, with a warning.
        max_tokens: of a micro-batch of one replica, as its memory allows, where a range does not say; None for as many
            as the longest sequence of its range has.
        grad_clip: largest norm of the gradients; 0 for no clipping.
        overlap: whether weights travel to the next strategy while the present one trains, and gradients from the
            strategy before, where memory suffices: a rank then holds two sets of weights while it trains.
        seed: of what layers draw at random, the same on all ranks: dropout's masks and such are a function of it, the
            step, the strategy's place in the step, the replica, the stage and the micro-batch. The generators stay.
        count: ``count(packed)`` tells how many tokens of a micro-batch count, for a loss that sums over those.

    Attributes:
        num_steps: how many are done; set it, alike on all ranks, where training is resumed.

    Raises:
        ValueError: for ranges that do not rise or whose strategies the model does not have, ``max_tokens`` below the
            longest sequence of a range, and layers that do not run on the meta device. For an optimizer that does not
            step all parameters that want gradients, or sees whole matrices where its strategy divides them, as Muon
            does; the other ranks may raise a RuntimeError then.
    """

    def __init__(
        self,
        model: SwitchableModel,
        optimizer: torch.optim.Optimizer,
        ranges: Iterable[LengthRange],
        *,
        loss: Loss,
        max_tokens: int | None = None,
        grad_clip: float = 0.0,
        overlap: bool = False,
        seed: int = 0,
        count: Count | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            loss=loss,
            count=count,
            grad_clip=grad_clip,
            seed=seed,
            hollow=Packed.hollow,
            sizes=["tokens"],
        )
        self._max_tokens, self._overlap = max_tokens, overlap
        self._switches = PlannedSwitches(model.tensors, model.nodes, TYPICAL_LINKS, model.num_layers)
        agreed(self._meet, lambda: self.use(ranges), what="the ranges")

    @property
    def ranges(self) -> tuple[LengthRange, ...]:
        """Return all ranges, each with its ``max_tokens``."""
        return self._ranges

    def use(self, ranges: Iterable[LengthRange]) -> None:
        """Train by other ranges from the next step on, the same on all ranks.

        Raises:
            ValueError: as the constructor does; the ranges stay as they are then.
        """
        wanted = tuple(
            replace(each, max_tokens=each.max_tokens or self._max_tokens or each.up_to) for each in as_ranges(ranges)
        )
        for length_range in wanted:
            if length_range.strategy not in self.model.strategies:
                known = ", ".join(map(str, self.model.strategies))
                raise ValueError(
                    f"length range {length_range}: the model's strategies are {known}; add(strategy) takes another"
                )
        self._order(list(dict.fromkeys(one.strategy for one in wanted)))
        self._ranges = wanted

    def change_strategies(self, strategies: Sequence[Strategy], optimizer_strategy: Strategy) -> int:
        """Train the ranges under other strategies from the next step on, which the model takes; collective.

        Args:
            strategies: one for each range.
            optimizer_strategy: in which the optimizer steps then.

        Returns:
            The bytes that this rank has received for the optimizer's strategy.

        Raises:
            Exception: as :meth:`~zeroresize.strategy.model.SwitchableModel.add`, ``model.move_optimizer`` and
                :meth:`use`; ranges and the optimizer's strategy stay as they are where memory does not suffice.
        """
        received = self._change_strategies(strategies, optimizer_strategy)
        self.use(
            replace(length_range, strategy=strategy)
            for length_range, strategy in zip(self.ranges, strategies, strict=True)
        )
        return received

    @by_one_thread
    def step(self, sequences: Sequence[Tensor]) -> StepReport:
        """Make one optimizer step on a mini-batch (HotSPa, hot switching); collective.

        Where the loss or the norm of the gradients is not finite, the optimizer does not step, on any rank.

        Args:
            sequences: rows [length + 1] of int64, the same on every rank.

        Raises:
            ValueError: on all ranks, where no target counts, and for tied parameters in groups of different settings.
            ValueError: for no sequences, a row of another kind, one that is longer than the last range, an optimizer
                that does not step the model's parameters, gradients that are left, and a model that is not under
                the optimizer's strategy; the other ranks raise a RuntimeError. Nothing has run then.
            RuntimeError: if ranks were given different sequences, or one does not come, and after a step that failed.
            Exception: what a layer or the loss raises. A step that fails while it runs is to be repeated from a
                checkpoint, and the process has to exit: else the other ranks wait for it until the process group's
                time limit. Only where all ranks failed alike may ``model.abandon()`` and another step follow.
        """
        begin = time.perf_counter()
        visits = self._agreed_visits(sequences, trains=True)
        with self._running():
            parts, by_range, switches = self._run(visits, sequences, trains=True)
            loss, norm, is_skipped, collected = self._step_optimizer(parts)
        total, seconds = sum(each.num_tokens for each in by_range), time.perf_counter() - begin
        return StepReport(loss, total, seconds, tuple(by_range), (*switches, collected), norm, is_skipped)

    @by_one_thread
    def evaluate(self, sequences: Sequence[Tensor]) -> float:
        """Return the mean loss of a token under the ranges' strategies, without gradients; collective.

        Layers are in evaluation mode meanwhile.

        Raises:
            Exception: as :meth:`step`, but for the optimizer, which is not asked.
        """
        visits = self._agreed_visits(sequences, trains=False)
        with self._running():
            parts, *_ = self._run(visits, sequences, trains=False)
            loss, _ = self._mean(parts)
            self.model.switch_to(self.model.optimizer_strategy, gradients=False)
        return loss

    def _agreed_visits(self, sequences: Sequence[Tensor], *, trains: bool) -> list[_PackedVisit]:
        """The visits in their order, each with this rank's micro-batches, once all ranks have the same."""
        self._require_no_failure()

        def packed_visits() -> list[_PackedVisit]:
            if self.model.current != self.model.optimizer_strategy:
                raise ValueError(
                    f"the model is under {self.model.current}, not the optimizer's strategy: abandon() gets it there"
                )
            require_sequences(sequences)
            if trains:
                require_ready_to_train(self.model, self.optimizer)
            visits = {visit.strategy: visit for visit in plan_visits([len(row) - 1 for row in sequences], self.ranges)}
            return [self._packed(visits[strategy], sequences) for strategy in self._order(list(visits))]

        def numbers_of(visits: list[_PackedVisit]) -> list[float]:
            options = [str(self.model.optimizer_strategy), trains, self._grad_clip, self._overlap, self._seed]
            options += [self.num_steps, str(autocast_dtype(self.model.device.type))]
            planned = [list(map(str, self.ranges)), [visit for visit, _ in visits]]
            parts = digest_of(sequences), str(planned), json.dumps(options)
            counted = ((visit.strategy, batches, [each.num_tokens for each in batches]) for visit, batches in visits)
            ties = settings_of_ties(self.model, self.optimizer if trains else None)
            return [*map(fingerprint, parts), self._count(counted), *ties]

        visits, table = agreed(self._meet, packed_visits, numbers_of, what="a step")
        for column, what in enumerate(_AGREED):
            require_same([row[column] for row in table], what, self._meet)
        self._loss.begin(total_count(row[len(_AGREED)] for row in table))
        require_equal_settings(self.model, [row[len(_AGREED) + 1 :] for row in table])
        return visits

    def _packed(self, visit: Visit, sequences: Sequence[Tensor]) -> _PackedVisit:
        position = visit.strategy.position_of(self.model.rank)
        replica = () if position is None else visit.replicas[position.replica]
        return visit, [Packed.of([sequences[at] for at in numbers]).to(self.model.device) for numbers in replica]

    def _order(self, strategies: Sequence[Strategy]) -> list[Strategy]:
        """The strategies by the tour whose switches take least, the optimizer's first where it is one of them."""
        return visiting_order(
            strategies,
            self.model.optimizer_strategy,
            lambda stops: self._switches.seconds(stops, 0),
            overlap=self._overlap,
        )

    def _run(
        self, visits: Sequence[_PackedVisit], sequences: Sequence[Tensor], *, trains: bool
    ) -> tuple[Tensor, list[RangeReport], list[SwitchReport]]:
        """This rank's parts of the loss, with gradients accumulated where it ``trains``; the last strategy stays."""
        parts, by_range, switches = torch.zeros(3, dtype=torch.float64), [], []
        strategies = [*(visit.strategy for visit, _ in visits), self.model.optimizer_strategy]
        for index, (visit, micro_batches) in enumerate(visits):
            if self.model.current != visit.strategy:
                in_background = self._overlap and trains
                report = self.model.switch_to(visit.strategy, gradients=trains, in_background=in_background)
                switches.append(report)
            if self._overlap and strategies[index + 1] != visit.strategy:
                self.model.prefetch(strategies[index + 1])
            begin, position = time.perf_counter(), self.model.position
            if position is not None:
                orders = instructions_of("1f1b", visit.strategy.pp, len(micro_batches)) if trains else None
                seed = seed_of(seed_of(self._seed, self.num_steps, index), position.replica, position.stage)
                parts += self._computed(micro_batches, seed, None if orders is None else orders[position.stage])
            synchronize(self.model.device)
            seconds, num_micro_batches = time.perf_counter() - begin, tuple(map(len, visit.replicas))
            members = visit.members
            num_tokens = sum(len(sequences[member]) - 1 for member in members)
            by_range.append(
                RangeReport(visit.strategy, visit.up_to, len(members), num_tokens, num_micro_batches, seconds)
            )
        return parts, by_range, switches
