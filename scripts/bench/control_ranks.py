"""The scenarios of ``scripts.bench.control`` on the ranks that torchrun started, in a ViT under Colossal-AI."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import zeroresize as zr
from scripts.bench.colossalai_ranks import ColossalAIRanks, Trainer
from scripts.bench.common import gather_from_ranks, slowness_of
from vit_examples.config import ModelConfig
from zeroresize.injection.slow_layers import SlowLayers

#: (update, number of ranks) → χ of every rank.
Chi = Callable[[int, int], list[float]]


@dataclass
class SlowedTrainer:
    """A model in training whose products are slowed."""

    trainer: Trainer
    balancer: zr.Balancer
    slowness: SlowLayers

    @classmethod
    def of(cls, config: zr.BalanceConfig, hidden: int) -> SlowedTrainer:
        ranks = _ranks()
        trainer = ranks.trainer(ModelConfig(hidden_size=hidden, depth=2, num_heads=12), batch_size=32)
        balancer = ranks.balance(trainer, config)
        return cls(trainer, balancer, slowness_of(trainer.model))

    def timed_step(self) -> float:
        """Wall seconds of one step; what other models did since the last one is none of this one's iteration."""
        self.balancer.release()
        return self.trainer.timed_step()


@functools.cache
def _ranks() -> ColossalAIRanks:
    return ColossalAIRanks()


@dataclass(frozen=True)
class Measured:
    """A scenario that was run for real.

    Attributes:
        step_ratios: step times as ratios to the homogeneous steps of the same update.
        ratios: γ [updates][ranks].
        baseline_ratios: the unbalanced model's step times as such ratios.
        own_chi: [updates][ranks] how much slower each rank was than the fastest in the homogeneous model: what the
            machine itself did.
    """

    step_ratios: list[float]
    ratios: list[list[float]]
    baseline_ratios: list[float]
    machine_chi: list[list[float]]


def measured(
    chi: Chi, updates: int, noise: float, config: zr.BalanceConfig, hidden: int, everyone: float = 1.0
) -> Measured:
    """Run a scenario for real.

    Every step of the balanced model is followed by one of an equal model in which all ranks are equally fast, and once
    an update by one of an equal model that is slowed and not balanced.

    Args:
        everyone: what every rank's χ, of all three models, is multiplied by.
    """
    ranks = _ranks()
    balanced = SlowedTrainer.of(config, hidden)
    baseline = SlowedTrainer.of(config.replace(mode="off", update_every=10**6), hidden)
    homogeneous = SlowedTrainer.of(config.replace(mode="off"), hidden)
    homogeneous.slowness.chi = everyone
    generator = np.random.default_rng(0)
    result = Measured([], [], [], [])
    with balanced.slowness, baseline.slowness, homogeneous.slowness:
        for update in range(updates):
            balanced_s, baseline_s = [], []
            for _ in range(config.update_every):
                factors = np.maximum(1.0 + noise * generator.standard_normal(ranks.num_ranks), 0.1)
                slow = [
                    everyone * max(slowness * float(factor), 1.0)
                    for slowness, factor in zip(chi(update, ranks.num_ranks), factors, strict=True)
                ]
                for model in (balanced, baseline):
                    model.slowness.chi = slow[ranks.rank]
                balanced_s.append(balanced.timed_step())
                baseline_s.append(homogeneous.timed_step())
            usual_s = statistics.median(baseline_s)
            result.step_ratios.extend(seconds / usual_s for seconds in balanced_s)
            result.baseline_ratios.append(baseline.timed_step() / usual_s)
            result.ratios.append([rank.pruned for rank in balanced.balancer.plan.ranks])
            busy_s = gather_from_ranks(homogeneous.balancer.metrics()["balance/busy_s"])
            result.machine_chi.append([seconds / min(busy_s) for seconds in busy_s])
    for model in (balanced, baseline, homogeneous):
        model.balancer.close()
    return result
