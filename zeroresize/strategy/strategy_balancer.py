"""Keeps a training with strategies fast while ranks are slow: measures, decides, changes strategies.

``G`` ranges of lengths, ``R`` ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields

from torch import Tensor

from zeroresize.measure.clocks import Clock
from zeroresize.policy.moves.rental import MIN_SAVING
from zeroresize.policy.strategy.costs.cost_model import CostModel
from zeroresize.policy.strategy.stragglers.candidates import StragglerCosts
from zeroresize.policy.strategy.stragglers.decision import TOLERANCE, StrategyProposal
from zeroresize.strategy.model import tell_ranks
from zeroresize.strategy.straggler_balancing import SHARES, ChangeRecord, StragglerBalancing
from zeroresize.strategy.trainer import StepReport, StrategyTrainer
from zeroresize.utils.checked import checked, real
from zeroresize.utils.hashing import digest


@checked(tell=lambda given, error: tell_ranks(given["trainer"].model, error), **SHARES, limit_bytes=real(above=0.0))
class StrategyBalancer(StragglerBalancing[list[int]]):
    """Changes a trainer's strategies where ranks are slow, and back, when that saves more than the switch takes::

        balancer = StrategyBalancer(trainer, cost)
        for sequences in batches:
            print(balancer.step(sequences).loss)

    Each rank's busy seconds, without waits, are compared with what its part of the step should have taken. The numbers
    travel while the next step runs; after it all ranks decide alike
    (:mod:`zeroresize.policy.strategy.stragglers.decision`). What working that out takes is measured, and what steps
    take is worked out anew so seldom that it is at most 1 % of training; nothing is while no rank is slow.

    A rank that was left out takes part in :meth:`step`, has nothing to train, and looks how fast it is by a few
    products, so that it comes back when it is fast again. Strategies that come for slow ranks are given to the model,
    and forgotten when no range has them. Results stay those of training under one strategy.

    Its constructor and :meth:`step` are collective.

    Args:
        trainer: the strategy of its model's optimizer must be the strategy of a range. Nobody else changes its ranges.
        cost: of the model and its machines; only its seconds relative to each other, its links and sizes count. What
            changes of strategies take is measured over the links, and learned from each.
        limit_bytes: memory of a rank for weights, gradients, optimizer state and activations.
        tolerance, min_saving: as of :class:`~zeroresize.policy.strategy.stragglers.decision.StragglerDecision`.
        probe: ``probe()`` gives seconds of a few products on this rank; None for products on its device.
        clock: for the busy seconds; None for that of the model's device.
        on_change: is given a :class:`~zeroresize.telemetry.ChangeRecord` after each
            decision that was carried out or could not be, on every rank.

    Raises:
        ValueError: for values that are not allowed, and where the optimizer's strategy is the strategy of no range; on
            all ranks, if they differ in the values; for an optimizer that sees whole matrices, as Muon does, since
            another strategy of the optimizer may divide them: the other ranks may raise a RuntimeError then.
        RuntimeError: if a rank does not come.
    """

    def __init__(
        self,
        trainer: StrategyTrainer,
        cost: CostModel,
        *,
        limit_bytes: float = math.inf,
        tolerance: float = TOLERANCE,
        min_saving: float = MIN_SAVING,
        probe: Callable[[], float] | None = None,
        clock: Clock | None = None,
        on_change: Callable[[ChangeRecord], object] | None = None,
    ) -> None:
        model, strategies = trainer.model, [each.strategy for each in trainer.ranges]
        if model.optimizer_strategy not in strategies:
            raise ValueError(
                f"the optimizer's strategy {model.optimizer_strategy} is the strategy of no range: "
                f"{', '.join(map(str, strategies))}"
            )
        number = strategies.index(model.optimizer_strategy)
        self._trainer = trainer
        costs = StragglerCosts(cost, trainer.ranges, optimizer_strategy=number, limit_bytes=limit_bytes)
        self._rank_s, self._number = costs.rank_s, number
        agreement = {f"cost.{field.name}": digest(repr(getattr(cost, field.name))).hex() for field in fields(cost)} | {
            "the ranges": " | ".join(f"{each}, max_tokens {each.max_tokens}" for each in trainer.ranges),
            "limit_bytes, tolerance or min_saving": f"{limit_bytes} {tolerance} {min_saving}",
        }
        super().__init__(
            trainer, "strategies", strategies, costs, agreement, tolerance, min_saving, probe, clock, on_change
        )

    def step(self, sequences: Sequence[Tensor]) -> StepReport:
        """Make one step of the trainer; the strategies of the ranges and the optimizer may be others behind it.

        Raises:
            Exception: as :meth:`StrategyTrainer.step <zeroresize.strategy.trainer.StrategyTrainer.step>`, and as
                ``model.move_optimizer``, except that memory that does not suffice leaves everything as it is.
        """
        lengths, rank = [len(row) - 1 for row in sequences], self._model.rank
        self._begin(has_part=any(each.position_of(rank) is not None for each in self.in_force))
        report = self._trainer.step(sequences)
        self._end(lengths, self._rank_s(self.in_force, lengths, rank), report.seconds)
        return report

    def _carry_out(self, proposal: StrategyProposal, speeds: tuple[float, ...]) -> int:
        wanted = proposal.candidate.strategies
        return self._trainer.change_strategies(wanted, wanted[self._number])
