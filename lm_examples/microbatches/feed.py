"""A GPT or T5 on samples of very different lengths, in micro-batches that ``RunPlanners`` plan ahead.

They do so in processes of their own; ``MicroBatchBalancer`` gives slow ranks less to do.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from lm_examples.data import Files
from lm_examples.feed import Feed
from lm_examples.layers import summed_loss
from lm_examples.microbatches.config import RunConfig
from lm_examples.microbatches.tasks import TaskSamples, padding_efficiency
from lm_examples.pace import Pace
from vit_examples.harness.dry_run import Needs
from vit_examples.harness.program import agreed
from zeroresize.microbatch import ChangeRecord, MicroBatchBalancer
from zeroresize.microbatch.measuring import kinds_of, measure_model
from zeroresize.microbatch.padded import PaddedBatch, PairBatch
from zeroresize.microbatch.planners import RunPlanners
from zeroresize.microbatch.planning_process import IterationPlanner
from zeroresize.microbatch.store import share_store
from zeroresize.microbatch.trainer import MicroBatchTrainer
from zeroresize.policy.microbatches.costs import CostTable
from zeroresize.policy.microbatches.planning import plan_iteration
from zeroresize.strategy.model import SwitchableModel

#: Mini-batches that a dry run shows.
_NUM_SHOWN = 4


class MicroBatchFeed(Feed):
    """Samples of many tasks; ``changes.jsonl`` tells what is done for slow ranks."""

    config: RunConfig
    model: SwitchableModel
    section, files = "parallel", ("changes",)

    def __init__(
        self, config: RunConfig, batches: TaskSamples, process_group: ProcessGroup, state: dict[str, Any] | None
    ) -> None:
        super().__init__(config, batches, process_group, state)
        layers = config.layers()
        self._pace = Pace(seconds_of=config.sleep.seconds_of if config.sleep.is_on else None)
        if self._pace.sleeps_for_work or config.straggler.rank is not None:
            self._pace.hold_up(layer for layer in layers if hasattr(layer, "segments"))
        self.model = SwitchableModel(layers, strategies=[config.parallel.strategy], process_group=process_group)
        self.optimizer = self.adamw(self.model.parameters())
        self._kind: type[PaddedBatch] | type[PairBatch] = PaddedBatch if config.model.kind == "gpt" else PairBatch
        self._start()

    def _start(self) -> None:
        """Measure the layers, or read what they cost, and start planners."""
        config, training, ways = self.config, self.config.training, self.config.microbatches.recompute
        table = self._costs()
        table = replace(table, grids={way: table.grids[way] for way in ways})
        boundaries = config.parallel.strategy.partition(config.model.num_layers).boundaries
        self._store = share_store(self._group)
        self._planners = RunPlanners(
            IterationPlanner(config.lengths, table, boundaries, config.options),
            self._store,
            self._group,
            self.model.device,
            first=self.step,
            last=training.steps - 1,
            num_workers=config.microbatches.workers,
            ahead=config.microbatches.ahead,
        )
        self._trainer = MicroBatchTrainer(
            self.model,
            self.optimizer,
            self._planners,
            batch_from=self._kind.of,
            hollow=self._kind.hollow,
            sizes=config.sizes,
            loss=summed_loss,
            grad_clip=training.grad_clip,
            seed=training.seed,
        )
        self._trainer.num_steps = self.step
        self._decider: MicroBatchBalancer | None = None
        if config.balance.is_on:
            self._decider = MicroBatchBalancer(
                self._trainer, self._planners, min_saving=config.balance.min_saving, on_change=self._tell
            )

    @staticmethod
    def batches_of(config: RunConfig, files: Files) -> TaskSamples:
        data = config.data
        longest = data.max_length + data.max_target + 2
        files.require(data, longest, f"data.max_length={data.max_length} and target")
        return TaskSamples(files, config.lengths)

    @staticmethod
    def needs_of(config: RunConfig, num_ranks: int) -> tuple[dict[str, list[Needs]], list[str]]:
        """Samples and, where costs are known, plans of some mini-batches; what ranks need is part of a plan."""
        costs = None if config.microbatches.costs is None else CostTable.load(config.microbatches.costs)
        notes = []
        for iteration in range(_NUM_SHOWN):
            lengths = config.lengths(iteration)
            padded = len(lengths) * lengths.max(axis=0).sum()
            note = f"mini-batch {iteration}: {len(lengths)} samples, {lengths.sum():,} tokens, the longest "
            note += f"{lengths.max(axis=0).tolist()}, {1 - lengths.sum() / padded:.0%} padding if all were as long"
            if costs is not None:
                by_way = costs.costs(config.parallel.strategy.partition(config.model.num_layers).boundaries)
                ways = {way: by_way[way] for way in config.microbatches.recompute if way in by_way}
                plan = plan_iteration(iteration, lengths, ways, config.options)
                microbatches = [each for replica in plan.replicas for each in replica.microbatches]
                most = max(max(replica.expected_bytes) for replica in plan.replicas)
                shares = ", ".join(f"{1 - share:.1%}" for share in padding_efficiency(microbatches, lengths))
                note += f"; {len(microbatches)} micro-batches, padding {shares}, computed again: {plan.recomputation}, "
                note += f"{1e3 * plan.expected_s:.1f} ms, activations {most / 2**20:.1f} MiB"
            notes.append(note)
        return {}, notes

    @property
    def title(self) -> str:
        parallel, kind = self.config.parallel, self.config.model.kind
        return f"{kind}, {parallel.dp} × {parallel.tp} × {parallel.pp} ranks, {self.config.microbatches.method}"

    def train_step(self) -> dict[str, float]:
        """One mini-batch, by its plan, and one step of the optimizer."""
        iteration = self.step - 1
        lengths = self.batches.lengths(iteration)
        self._pace.chi = self.config.straggler.chi_of(self.step, self.model.rank)
        report = (self._decider or self._trainer).step(self.batches.training(iteration), lengths)
        return {
            "loss": report.loss,
            "step_s": report.seconds,
            "wait_s": report.wait_s,
            "expected_s": report.expected_s,
            "tokens": float(lengths.sum()),
            "computed_tokens": float(report.computed_tokens),
            "micro_batches": float(sum(report.num_microbatches)),
        }

    def shown(self, means: dict[str, float]) -> dict[str, Any]:
        padding = 1.0 - means["tokens"] / means["computed_tokens"]
        return {**means, "padding": padding, "tokens_per_s": means["tokens"] / means["step_s"]}

    def held_out_loss(self, number: int) -> float:
        lengths = self.batches.lengths.held_out(number)
        return self._trainer.evaluate(self.batches.held_out(number), lengths, self.config.training.tokens)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "decider": None if self._decider is None else self._decider.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        if self._decider is not None and state["decider"] is not None:
            self._decider.load_state_dict(state["decider"])

    def summary(self) -> dict[str, Any]:
        planned_s = list(self._planners.seconds().values())
        planning_s = statistics.fmean(planned_s) if planned_s else float("nan")
        return {**super().summary(), "planning_s": planning_s}

    def leave(self) -> None:
        if self._decider is not None:
            self._decider.close()
        self._planners.close()
        self._store.close()

    def _costs(self) -> CostTable:
        config, path = self.config, self.config.microbatches.costs
        if path is not None:
            return agreed(lambda: _costs_from(path, config, self.model), self._group)
        table = measure_model(
            self.model,
            self._kind.hollow,
            config.shapes,
            loss=summed_loss,
            recomputations=config.microbatches.recompute,
        )
        folder = Path(config.output.folder)
        agreed(lambda: table.save(folder / "costs.json"), self._group, first_only=True)
        return table

    def _tell(self, change: ChangeRecord) -> None:
        """What became of samples and layers, as ranks were slow."""
        if self.record is not None:
            self.record.write("changes", change.to_dict())
            expected_ms = f"{1e3 * change.step_s:.0f} -> {1e3 * change.expected_step_s:.0f} ms expected"
            self.record.tell(f"step {change.step}: {change.what}, {expected_ms}, in {change.change_s:.2f} s")


def _costs_from(path: str, config: RunConfig, model: SwitchableModel) -> CostTable:
    try:
        table = CostTable.load(path)
        table.require_model(kinds_of(model.whole_layers), config.sizes)
    except (ValueError, OSError) as error:
        raise ValueError(f"microbatches.costs={path}: {error}") from error
    missing = sorted(set(config.microbatches.recompute) - set(table.grids))
    if missing:
        raise ValueError(f"microbatches.costs={path}: nothing is known of recomputing {missing}; measure again")
    return table
