"""Strategies of parallelism that change while training goes on (HotSPa).

- :class:`Strategy` is (DP, TP, PP) on a set of ranks; :class:`LengthRange` says which one trains which sequences.
- :class:`SwitchableModel` is a model of plain layers whose weights go from one strategy to another.
- :class:`StrategyTrainer` trains a mini-batch, each sequence under the strategy of its length, in one optimizer step.
- :func:`search_strategies` finds the ranges and strategies, by costs that :func:`measure_layer_costs` measures.
- :class:`StrategyBalancer` changes strategies where ranks are slow, and back.
- ``zr.sharded_state_dict(model, optimizer)`` is a checkpoint, for any other strategy.

Layers are called ``layer(x, packed)``, with a :class:`Packed` micro-batch. A guide with a whole program:
docs/strategies.md.
"""

from zeroresize.plan.strategy import LengthRange, Position, Strategy
from zeroresize.policy.strategy.costs.cost_model import CostModel
from zeroresize.policy.strategy.costs.search import SearchResult, candidate_strategies, search_strategies
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds
from zeroresize.strategy.calibrate import measure_layer_costs, measure_links
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.packed import Packed
from zeroresize.strategy.step_trainer import clip_grad_norm_
from zeroresize.strategy.strategy_balancer import StrategyBalancer
from zeroresize.strategy.switching.switch import SwitchReport
from zeroresize.strategy.trainer import RangeReport, StepReport, StrategyTrainer
from zeroresize.telemetry import ChangeRecord

__all__ = [
    "ChangeRecord",
    "CostModel",
    "LengthRange",
    "LinkSpeeds",
    "Packed",
    "Position",
    "RangeReport",
    "SearchResult",
    "StepReport",
    "Strategy",
    "StrategyBalancer",
    "StrategyTrainer",
    "SwitchReport",
    "SwitchableModel",
    "candidate_strategies",
    "clip_grad_norm_",
    "measure_layer_costs",
    "measure_links",
    "search_strategies",
]
