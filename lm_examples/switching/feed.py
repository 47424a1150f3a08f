"""A LLaMA-like model under strategies that are switched inside every step, by ``StrategyTrainer``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed import ProcessGroup

from lm_examples.data import Files
from lm_examples.documents import MiniBatches, sources_of
from lm_examples.feed import Feed
from lm_examples.llama import token_loss
from lm_examples.needs import rank_needs
from lm_examples.switching.config import RunConfig
from lm_examples.switching.search import Choice, candidates_of, chosen
from vit_examples.harness.dry_run import Needs
from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.trainer import StrategyTrainer


class StrategyFeed(Feed):
    """Mini-batches of documents, each sequence under the strategy of its length."""

    config: RunConfig
    model: SwitchableModel
    section = "strategies"

    def __init__(
        self, config: RunConfig, batches: MiniBatches, process_group: ProcessGroup, state: dict[str, Any] | None
    ) -> None:
        super().__init__(config, batches, process_group, state)
        training = config.training
        if config.strategies.memory_limit is not None and not config.strategies.search:
            needs_of(config, dist.get_world_size(process_group))
        layers = config.layers()
        shows = config.output.progress and dist.get_rank(process_group) == 0
        self._choice: Choice = chosen(
            config, layers, batches, process_group, lambda line: print(line, flush=True) if shows else None
        )
        self.model = SwitchableModel(
            layers,
            strategies=list(dict.fromkeys(one.strategy for one in self._choice.ranges)),
            process_group=process_group,
            optimizer_strategy=self._choice.optimizer_strategy,
            compute_dtype=None if training.compute_dtype is None else training.computing_dtype,
            gradient_dtype=None if training.gradient_dtype is None else getattr(torch, training.gradient_dtype),
        )
        self.optimizer = self.adamw(self.model.parameters())
        self._trainer = StrategyTrainer(
            self.model,
            self.optimizer,
            self._choice.ranges,
            loss=token_loss,
            max_tokens=training.max_tokens,
            grad_clip=training.grad_clip,
            overlap=config.strategies.overlap,
            seed=training.seed,
        )
        self._trainer.num_steps = self.step

    @staticmethod
    def batches_of(config: RunConfig, files: Files) -> MiniBatches:
        return MiniBatches(sources_of(config.data, files), tokens=config.training.tokens, seed=config.training.seed)

    @staticmethod
    def needs_of(config: RunConfig, num_ranks: int) -> tuple[dict[str, list[Needs]], list[str]]:
        return {str(strategy): of_ranks for strategy, of_ranks in needs_of(config, num_ranks).items()}, []

    @property
    def title(self) -> str:
        num_strategies = len({one.strategy for one in self._choice.ranges})
        return f"{self._group.size()} ranks, {num_strategies} strategies, optimizer in {self.model.optimizer_strategy}"

    def begin(self) -> None:
        """Show how many sequences and tokens each range has, of a sample, and what a search expects of it."""
        assert self.record is not None
        lengths, result = np.concatenate(self.batches.sample()), self._choice.result
        if result is not None:
            one_s = result.static.step_s
            self.record.tell(
                f"expected: {1e3 * result.best.step_s:.1f} ms a step, with one strategy {1e3 * one_s:.1f} ms"
            )
        table = Table("length", "strategy", "sequences", "tokens", title=f"{len(lengths)} sequences of a sample")
        ends = [length_range.up_to for length_range in self._choice.ranges]
        for begin, length_range in zip([0, *ends], self._choice.ranges, strict=False):
            is_inside = (lengths > begin) & (lengths <= length_range.up_to)
            shares = is_inside.mean(), lengths[is_inside].sum() / lengths.sum()
            span = f"{begin + 1} to {length_range.up_to}"
            table.add_row(span, str(length_range.strategy), *(f"{100 * share:.1f} %" for share in shares))
        self.record.tell(table)

    def train_step(self) -> dict[str, float]:
        """One mini-batch, under as many strategies as its lengths ask for, and one step of the optimizer."""
        report = self._trainer.step(self.batches.training(self.step))
        numbers = {
            "loss": report.loss,
            "step_s": report.seconds,
            "switch_s": sum(switch.seconds for switch in report.switches),
            "tokens": float(report.num_tokens),
        }
        for visit in report.by_range:
            numbers[f"{visit.strategy}: sequences"] = float(visit.num_sequences)
            numbers[f"{visit.strategy}: tokens"] = float(visit.num_tokens)
            numbers[f"{visit.strategy}: seconds"] = visit.seconds
        return numbers

    def shown(self, means: dict[str, float]) -> dict[str, Any]:
        """With what each strategy trained under ``ranges``."""
        of_step = {name: value for name, value in means.items() if ": " not in name}
        of_ranges = {name: value for name, value in means.items() if ": " in name}
        return {**of_step, "tokens_per_s": means["tokens"] / means["step_s"], "ranges": of_ranges}

    def held_out_loss(self, number: int) -> float:
        return self._trainer.evaluate(self.batches.validation(number))

    def summary(self) -> dict[str, Any]:
        return {**super().summary(), "optimizer_strategy": str(self._choice.optimizer_strategy)}


def needs_of(config: RunConfig, num_ranks: int) -> dict[Strategy, list[Needs]]:
    """[R] of each rank, by strategy; of all that a search could find, each as the optimizer's.

    Raises:
        ValueError: naming rank and strategy, where more than ``strategies.memory_limit`` is needed; a search minds it.
    """
    if config.strategies.search:
        return {each: rank_needs(config, each, each, num_ranks) for each in candidates_of(config, num_ranks)}
    used = dict.fromkeys([config.optimizer_strategy, *(each.strategy for each in config.ranges)])
    needs = {strategy: rank_needs(config, strategy, config.optimizer_strategy, num_ranks) for strategy in used}
    limit = config.strategies.memory_limit
    for strategy, of_ranks in needs.items():
        total, rank = max((each.total, -rank) for rank, each in enumerate(of_ranks))
        if limit is not None and total > limit:
            raise ValueError(
                f"strategies.memory_limit={limit:g}: rank {-rank} needs {total / 1e6:,.1f} MB under {strategy}: "
                "choose more tp or pp, another strategy of the optimizer, or smaller training.max_tokens"
            )
    return needs
