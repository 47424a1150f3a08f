"""The scenarios of ``scripts.bench_control`` on the ranks that torchrun started, in a ViT under Colossal-AI."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import zeroresize as zr
from scripts.benching import ColossalAIRanks, Trainer, of_every_rank
from vit_examples.config import ModelConfig

#: (update, number of ranks) → χ of every rank.
Chi = Callable[[int, int], list[float]]


@dataclass
class SlowedTrainer:
    """A model in training whose products an injector slows."""

    trainer: Trainer
    balancer: zr.Balancer
    injector: zr.StragglerInjector

    def timed_step(self) -> float:
        """Wall seconds of one step; what other models did since the last one is none of this one's iteration."""
        self.balancer.release()
        return self.trainer.timed_step()


@functools.cache
def _ranks() -> ColossalAIRanks:
    return ColossalAIRanks()


def _slowed(config: zr.BalanceConfig, hidden: int) -> SlowedTrainer:
    ranks = _ranks()
    trainer = ranks.trainer(ModelConfig(hidden_size=hidden, depth=2, num_heads=12), batch_size=32)
    balancer = ranks.balance(trainer, config)
    injector = zr.StragglerInjector(
        trainer.model, process_group=ranks.group, chi=dict.fromkeys(range(ranks.num_ranks), 1.0)
    )
    return SlowedTrainer(trainer, balancer, injector)


@dataclass(frozen=True)
class Measured:
    """A scenario that was run for real.

    Attributes:
        step_ratios: step times as ratios to the homogeneous steps of the same update.
        ratios: γ [updates][ranks].
        baseline_ratios: the unbalanced model's step times as such ratios.
        own_chi: [updates][ranks] how much slower each rank was than the fastest where nothing slowed it: what the
            machine itself did.
    """

    step_ratios: list[float]
    ratios: list[list[float]]
    baseline_ratios: list[float]
    own_chi: list[list[float]]


def measured(chi: Chi, updates: int, noise: float, config: zr.BalanceConfig, hidden: int) -> Measured:
    """Run a scenario for real.

    Every step of the balanced model is followed by one of an equal model that nothing slows, and once an update by one
    of an equal model that is slowed and not balanced.
    """
    ranks = _ranks()
    balanced = _slowed(config, hidden)
    baseline = _slowed(config.replace(mode="off", update_every=10**6), hidden)
    homogeneous = _slowed(config.replace(mode="off"), hidden)  # by nothing
    generator = np.random.default_rng(0)
    result = Measured([], [], [], [])
    with balanced.injector, baseline.injector:
        for update in range(updates):
            own_s, other_s = [], []
            for _ in range(config.update_every):
                factors = np.maximum(1.0 + noise * generator.standard_normal(ranks.num_ranks), 0.1)
                slow = {
                    rank: max(own * float(factor), 1.0)
                    for rank, (own, factor) in enumerate(zip(chi(update, ranks.num_ranks), factors, strict=True))
                }
                for model in (balanced, baseline):
                    model.injector.set_chi(slow)
                own_s.append(balanced.timed_step())
                other_s.append(homogeneous.timed_step())
            usual_s = statistics.median(other_s)
            result.step_ratios.extend(seconds / usual_s for seconds in own_s)
            result.baseline_ratios.append(baseline.timed_step() / usual_s)
            result.ratios.append([rank.pruned for rank in balanced.balancer.plan.ranks])
            busy_s = of_every_rank(homogeneous.balancer.metrics()["balance/busy_s"])
            result.own_chi.append([seconds / min(busy_s) for seconds in busy_s])
    for model in (balanced, baseline, homogeneous):
        model.balancer.close()
    return result
