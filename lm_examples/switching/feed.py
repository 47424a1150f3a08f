"""A LLaMA-like model under strategies that are switched inside every step, by ``StrategyTrainer``."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed import ProcessGroup

from lm_examples.documents import Documents, MiniBatches, load_documents
from lm_examples.feed import Feed, StepMeans
from lm_examples.llama import llama_layers, token_loss
from lm_examples.switching.config import RunConfig
from lm_examples.switching.needs import needs_of, require_memory
from lm_examples.switching.search import Choice, chosen
from vit_examples.harness.dry_run import Needs
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.trainer import StepReport, StrategyTrainer


class StrategyFeed(Feed):
    """Mini-batches of documents, each sequence under the strategy of its length."""

    config: RunConfig
    model: SwitchableModel

    def __init__(
        self, config: RunConfig, data: Documents, process_group: ProcessGroup, state: dict[str, Any] | None
    ) -> None:
        super().__init__(config, data, process_group, state)
        training = config.training
        if not config.strategies.search and config.strategies.memory_limit is not None:
            require_memory(config, needs_of(config, dist.get_world_size(process_group)))
        torch.manual_seed(training.seed)
        layers = [layer.to(getattr(torch, training.dtype)) for layer in llama_layers(config.model)]
        self._batches = MiniBatches(data, tokens=training.tokens, seed=training.seed)
        shows = config.output.progress and dist.get_rank(process_group) == 0
        self._choice: Choice = chosen(
            config, layers, self._batches, process_group, lambda line: print(line, flush=True) if shows else None
        )
        self.model = SwitchableModel(
            layers,
            strategies=list(dict.fromkeys(one.strategy for one in self._choice.ranges)),
            process_group=process_group,
            optimizer_strategy=self._choice.optimizer_strategy,
            compute_dtype=None if training.compute_dtype is None else training.computing_dtype,
            gradient_dtype=None if training.gradient_dtype is None else getattr(torch, training.gradient_dtype),
        )
        # As a group, which may be empty: a rank the optimizer's strategy leaves out has no parameters.
        groups = [{"params": list(self.model.parameters())}]
        self.optimizer = torch.optim.AdamW(groups, lr=training.lr, weight_decay=training.weight_decay)
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
        self._means = StepMeans()

    @staticmethod
    def load_data(config: RunConfig) -> tuple[Documents, str]:
        documents = load_documents(config.data)
        return documents, documents.digest

    @staticmethod
    def needs_of(config: RunConfig, num_ranks: int) -> tuple[dict[str, list[Needs]], list[str]]:
        load_documents(config.data)
        needs = needs_of(config, num_ranks)
        if not config.strategies.search:
            require_memory(config, needs)
        return {str(strategy): of_ranks for strategy, of_ranks in needs.items()}, []

    @property
    def title(self) -> str:
        num_strategies = len({one.strategy for one in self._choice.ranges})
        return f"{self._group.size()} ranks, {num_strategies} strategies, optimizer in {self.model.optimizer_strategy}"

    def begin(self) -> None:
        """Show how many sequences and tokens each range has, of a sample, and what a search expects of it."""
        assert self.record is not None
        lengths, result = np.concatenate(self._batches.sample()), self._choice.result
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

    def train_step(self) -> None:
        """One mini-batch, under as many strategies as its lengths ask for, and one step of the optimizer."""
        numbers = _numbers_of(self._trainer.step(self._batches.training(self.step)))
        self._means.add(numbers, is_last=self.step == self.config.training.steps)

    def numbers(self) -> dict[str, Any]:
        return _grouped(self._means.since())

    def validate(self) -> float:
        numbers = range(self.config.training.validation_batches)
        return statistics.fmean(self._trainer.evaluate(self._batches.validation(number)) for number in numbers)

    def summary(self) -> dict[str, Any]:
        return {**_grouped(self._means.settled()), "optimizer_strategy": str(self._choice.optimizer_strategy)}


def _grouped(means: dict[str, float]) -> dict[str, Any]:
    """With what each strategy trained under ``ranges``."""
    of_step = {name: value for name, value in means.items() if ": " not in name}
    of_ranges = {name: value for name, value in means.items() if ": " in name}
    return {**of_step, "tokens_per_s": means["tokens"] / means["step_s"], "ranges": of_ranges}


def _numbers_of(report: StepReport) -> dict[str, float]:
    """Of a step: seconds of each strategy, and of switches with the sum of the gradients over replicas."""
    numbers = {
        "loss": report.loss,
        "step_s": report.seconds,
        "switch_s": sum(one.seconds for one in report.switches),
        "tokens": float(report.num_tokens),
    }
    for visit in report.by_range:
        numbers[f"{visit.strategy}: sequences"] = float(visit.num_sequences)
        numbers[f"{visit.strategy}: tokens"] = float(visit.num_tokens)
        numbers[f"{visit.strategy}: seconds"] = visit.seconds
    return numbers
