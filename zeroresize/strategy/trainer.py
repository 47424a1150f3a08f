"""Training with a strategy for each range of lengths, switched inside every optimizer step (HotSPa, hot switching)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zeroresize.plan.length_range import LengthRange, as_ranges, with_limits
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.costs.planned_switches import PlannedSwitches
from zeroresize.policy.strategy.packing import Visit, Work, num_tokens, plan_visits
from zeroresize.policy.strategy.switches.switch_order import visiting_order
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds
from zeroresize.resharding.agreement import agreed, require_same
from zeroresize.runtime.communication import instructions_of
from zeroresize.runtime.counted_loss import Count, Loss, total_count
from zeroresize.runtime.random_numbers import seed_of
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.packed import Packed, digest_of, require_sequences
from zeroresize.strategy.step_report import RangeReport, StepReport
from zeroresize.strategy.step_trainer import StepTrainer, require_ready_to_train
from zeroresize.strategy.switching.switch import SwitchReport
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.torch_state import autocast_dtype
from zeroresize.utils.value_checks import is_bool

#: Of NVLink and InfiniBand, roughly. Orders depend on their ratio alone, and inside one node on neither.
TYPICAL_LINKS = LinkSpeeds(within_bytes_per_s=200e9, between_bytes_per_s=25e9)
#: What ranks compare before a step, in this order: the ranges' visits follow from the sequences.
_AGREED = (
    "the sequences: every rank must be given the whole mini-batch, in one order",
    "the ranges, their strategies, max_tokens, work or links",
    "step() or evaluate(), grad_clip, overlap, seed, num_steps, the optimizer's strategy or torch.autocast",
)


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
        work: what sequences cost, by which replicas share them; their tokens by default.
        links: between the ranks, by which switches are ordered.
        overlap: whether weights travel to the next strategy while the present one trains, and gradients from the
            strategy before, where memory suffices: a rank then holds two sets of weights while it trains.
        seed: of what layers draw at random, such as dropout's masks: they are a function of it, the step, the
            strategy's place in the step, the replica, the stage and the micro-batch. The generators stay as they are.
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
        ranges: Sequence[LengthRange],
        *,
        loss: Loss,
        max_tokens: int | None = None,
        grad_clip: float = 0.0,
        work: Work = num_tokens,
        links: LinkSpeeds = TYPICAL_LINKS,
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
        is_bool("overlap", overlap)
        self._max_tokens, self._work, self._overlap = max_tokens, work, overlap
        self._switches = PlannedSwitches(model.tensors, model.nodes, links, model.num_layers)
        self.use(ranges)

    @property
    def ranges(self) -> tuple[LengthRange, ...]:
        """Return all ranges, each with its ``max_tokens``."""
        return self._ranges

    def use(self, ranges: Iterable[LengthRange]) -> None:
        """Train by other ranges from the next step on, the same on all ranks.

        Raises:
            ValueError: as the constructor does; the ranges stay as they are then.
        """
        wanted = with_limits(as_ranges(ranges), self._max_tokens)
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
        received = 0
        for strategy in dict.fromkeys(strategies):
            if strategy not in self.model.strategies:
                self.model.add(strategy)
        if optimizer_strategy != self.model.optimizer_strategy:
            received = self.model.move_optimizer(optimizer_strategy, self.optimizer).received_bytes
        self.use(
            replace(length_range, strategy=strategy)
            for length_range, strategy in zip(self.ranges, strategies, strict=True)
        )
        return received

    def step(self, sequences: Sequence[Tensor]) -> StepReport:
        """Make one optimizer step on a mini-batch (HotSPa, hot switching); collective.

        Where the loss or the norm of the gradients is not finite, the optimizer does not step, on any rank.

        Args:
            sequences: rows [length + 1] of int64, the same on every rank.

        Raises:
            ValueError: on all ranks, where no target counts.
            ValueError: for no sequences, a row of another kind, one that is longer than the last range, an optimizer
                that does not step the model's parameters, gradients that are left, and a model that is not under
                the optimizer's strategy; the other ranks raise a RuntimeError. Nothing has run then.
            RuntimeError: if ranks were given different sequences, or one does not come, and after a step that failed.
            Exception: what a layer or the loss raises. A step that fails while it runs is to be repeated from a
                checkpoint, and the process has to exit: else the other ranks wait for it until the process group's
                time limit. Only where all ranks failed alike may ``model.abandon()`` and another step follow.
        """
        begin = time.perf_counter()
        visits, packed = self._agreed_visits(sequences, trains=True)
        with self._running():
            parts, by_range, switches = self._run(visits, packed, sequences, trains=True)
            loss, norm, is_skipped, collected = self._step_optimizer(parts)
        total, seconds = sum(one.num_tokens for one in by_range), time.perf_counter() - begin
        return StepReport(loss, total, seconds, tuple(by_range), (*switches, collected), norm, is_skipped)

    def evaluate(self, sequences: Sequence[Tensor]) -> float:
        """Return the mean loss of a token under the ranges' strategies, without gradients; collective.

        Layers are in evaluation mode meanwhile.

        Raises:
            Exception: as :meth:`step`, but for the optimizer, which is not asked.
        """
        visits, packed = self._agreed_visits(sequences, trains=False)
        with self._running():
            parts, *_ = self._run(visits, packed, sequences, trains=False)
            loss, _ = self._mean(parts)
            self.model.switch_to(self.model.optimizer_strategy, gradients=False)
        return loss

    def _agreed_visits(self, sequences: Sequence[Tensor], *, trains: bool) -> tuple[list[Visit], list[list[Packed]]]:
        """The visits, and this rank's micro-batches of each."""
        self._require_no_failure()

        def packed_visits() -> tuple[list[Visit], list[list[Packed]]]:
            visits = self._visits(sequences, trains)
            return visits, [self._packed(visit, sequences) for visit in visits]

        def numbers_of(made: tuple[list[Visit], list[list[Packed]]]) -> list[float]:
            visits, packed = made
            options = [str(self.model.optimizer_strategy), trains, self._grad_clip, self._overlap, self._seed]
            options += [self.num_steps, str(autocast_dtype(self.model.device.type))]
            parts = digest_of(sequences), str([list(map(str, self.ranges)), str(visits)]), json.dumps(options)
            return [*map(fingerprint, parts), self._count(visits, packed)]

        (visits, packed), table = agreed(self._meet, packed_visits, numbers_of)
        for column, what in enumerate(_AGREED):
            require_same([row[column] for row in table], what, self._meet)
        self._loss.begin(total_count(row[len(_AGREED)] for row in table))
        return visits, packed

    def _packed(self, visit: Visit, sequences: Sequence[Tensor]) -> list[Packed]:
        position = visit.strategy.position_of(self.model.rank)
        replica = () if position is None else visit.replicas[position.replica]
        return [Packed.of([sequences[index] for index in members]).to(self.model.device) for members in replica]

    def _count(self, visits: Sequence[Visit], packed: Sequence[Sequence[Packed]]) -> float:
        """What counts of this rank's micro-batches; those of each replica count on one rank."""
        positions = [visit.strategy.position_of(self.model.rank) for visit in visits]
        mine = [
            (micro_batch, position.shard == 0)
            for position, visit, micro_batches in zip(positions, visits, packed, strict=True)
            if position is not None and position.stage == visit.strategy.pp - 1
            for micro_batch in micro_batches
        ]
        counts = self._counts_of([each for each, _ in mine], [each.num_tokens for each, _ in mine])
        return sum(count for count, (_, is_first) in zip(counts, mine, strict=True) if is_first)

    def _visits(self, sequences: Sequence[Tensor], trains: bool) -> list[Visit]:
        if self.model.current != self.model.optimizer_strategy:
            raise ValueError(
                f"the model is under {self.model.current}, not the optimizer's strategy: abandon() gets it there"
            )
        require_sequences(sequences)
        if trains:
            require_ready_to_train(self.model, self.optimizer)
        lengths = [len(one) - 1 for one in sequences]
        visits = {one.strategy: one for one in plan_visits(lengths, self.ranges, self._work)}
        return [visits[strategy] for strategy in self._order(list(visits))]

    def _order(self, strategies: Sequence[Strategy]) -> list[Strategy]:
        """The strategies by the tour whose switches take least, the optimizer's first where it is one of them."""
        return visiting_order(
            strategies,
            self.model.optimizer_strategy,
            lambda stops: self._switches.seconds(stops, 0),
            overlap=self._overlap,
        )

    def _run(
        self,
        visits: Sequence[Visit],
        packed: Sequence[Sequence[Packed]],
        sequences: Sequence[Tensor],
        *,
        trains: bool,
    ) -> tuple[Tensor, list[RangeReport], list[SwitchReport]]:
        """This rank's parts of the loss, with gradients accumulated where it ``trains``; the last strategy stays."""
        lengths = [len(one) - 1 for one in sequences]
        parts = torch.zeros(3, dtype=torch.float64)
        by_range, switches = [], []
        for index, visit in enumerate(visits):
            if self.model.current != visit.strategy:
                in_background = self._overlap and trains
                report = self.model.switch_to(visit.strategy, gradients=trains, in_background=in_background)
                switches.append(report)
            if self._overlap:
                next_strategies = [*(one.strategy for one in visits[index + 1 :]), self.model.optimizer_strategy]
                if next_strategies[0] != visit.strategy:
                    self.model.prefetch(next_strategies[0])
            begin = time.perf_counter()
            visited = [lengths[index] for index in visit.members]
            parts += self._run_part(packed[index], trains, seed_of(self._seed, self.num_steps, index))
            self._synchronize()
            seconds, num_micro_batches = time.perf_counter() - begin, tuple(map(len, visit.replicas))
            by_range.append(
                RangeReport(visit.strategy, visit.up_to, len(visited), sum(visited), num_micro_batches, seconds)
            )
        return parts, by_range, switches

    def _run_part(self, micro_batches: Sequence[Packed], trains: bool, seed: int) -> Tensor:
        position, num_stages = self.model.position, self.model.current.pp
        if position is None:
            return torch.zeros(3, dtype=torch.float64)
        instructions = instructions_of("1f1b", num_stages, len(micro_batches))[position.stage] if trains else None
        return self._computed(micro_batches, seed_of(seed, position.replica, position.stage), instructions)
