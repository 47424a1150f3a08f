"""A GPT in a pipeline whose layers move: what balancing adds is ``PipelineBalancer`` and ``with balancer.step()``."""

from __future__ import annotations

import json
import math
import statistics
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lm_examples.data import Files, TokenBatches
from lm_examples.feed import Feed
from lm_examples.needs import first_boundaries, rank_needs, stage_names
from lm_examples.pace import CountedBlocks, Pace
from lm_examples.pipeline_config import RunConfig
from vit_examples.harness.config_reader import plain
from vit_examples.harness.dry_run import Needs
from vit_examples.harness.program import of_all_ranks
from zeroresize.pipeline import ChangeRecord, Pipeline, PipelineBalancer, ProfileRecord, clip_grad_norm_
from zeroresize.plan.strategy import Strategy


class PipelineFeed(Feed):
    """Stages of layers, of which each step trains micro-batches.

    ``pipeline.jsonl`` has profiles and moves, ``status.jsonl`` is for ``zeroresize live`` and ``report``.
    """

    config: RunConfig
    model: Pipeline
    section, files = "pipeline", ("pipeline", "status")

    def __init__(
        self, config: RunConfig, batches: TokenBatches, process_group: ProcessGroup, state: dict[str, Any] | None
    ) -> None:
        super().__init__(config, batches, process_group, state)
        self._case, training, balance = config.make_case(), config.training, config.balance
        layers = config.layers(case=self._case)
        self.model = Pipeline(
            layers,
            self._case.loss,
            num_microbatches=training.micro_batches,
            process_group=process_group,
            boundaries=self._boundaries(layers, process_group.size(), state),
            schedule=config.pipeline.schedule,
        )
        self.optimizer = self.adamw(self.model.parameters())
        self._pace = Pace(config.sleep.forward_s)
        self._pace.hold_up(layers[1:-1])
        self._first_stage = self.model.stage  # re-packing may renumber the pipeline's
        self._figures: dict[str, float] = {}
        self._num_moves = 0
        if balance.is_on:
            counts_work = self._case.changes_every_step and balance.count_work == "on"
            self.balancer = PipelineBalancer(
                self.model,
                self.optimizer,
                profile_every=balance.profile_every,
                max_measuring=math.inf if balance.max_measuring is None else balance.max_measuring,
                count_work=CountedBlocks(layers[1:-1]) if counts_work else None,
                by=balance.by,
                memory_limits=balance.memory_limits,
                min_saving=balance.min_saving,
                on_change=self._tell,
                on_profile=self._tell,
                repack=config.repack.options(),
            )

    @staticmethod
    def batches_of(config: RunConfig, files: Files) -> TokenBatches:
        training, context = config.training, config.model.context
        files.require(config.data, context, f"model.context={context}")
        return TokenBatches(files, batch_size=training.batch_size, context=context, seed=training.seed)

    @staticmethod
    def layout_of(config: RunConfig) -> dict[str, Any]:
        return {**Feed.layout_of(config), "case": json.loads(json.dumps(plain(config)["case"]))}

    @property
    def title(self) -> str:
        config = self.config
        return f"{config.case.name}, {self.model.num_stages} stages, balance {config.balance.mode}"

    @property
    def process_group(self) -> ProcessGroup:
        return self.model.process_group

    def train_step(self) -> dict[str, float] | None:
        """Forward, backward and the optimizer's step; between them layers may move, and this rank may be released."""
        begin = time.perf_counter()
        self._pace.chi = self.config.straggler.chi_of(self.step, self._first_stage)
        inputs, target = self.batches.training(self.step)
        self.optimizer.zero_grad()
        with nullcontext() if self.balancer is None else self.balancer.step():
            loss = self.model.step(inputs, target=target)
            step_loss = None if loss is None else loss.item()
            if self.config.repack.is_on:  # the last stage may be released with what it knows
                step_loss = of_all_ranks(step_loss, self.process_group)[-1]
        if self.model.is_released:
            return None
        if self.config.training.grad_clip > 0.0:
            clip_grad_norm_(self.model, self.config.training.grad_clip)
        self.optimizer.step()
        is_last_stage = self.model.stage == self.model.num_stages - 1
        has_changed = self._case.after_step(self.model, self.optimizer, self.step, step_loss if is_last_stage else None)
        if has_changed and self.balancer is not None:
            self.balancer.profile_next()
        loss_here = math.nan if step_loss is None else step_loss
        return {"step_s": time.perf_counter() - begin, "loss": loss_here}

    def shown(self, means: dict[str, float]) -> dict[str, Any]:
        of_stages = of_all_ranks((means["loss"], self._case.figures(self.model)), self.process_group)
        names = dict.fromkeys(name for _, figures in of_stages for name in figures)
        self._figures = {
            name: statistics.fmean(figures[name] for _, figures in of_stages if name in figures) for name in names
        }
        return {
            "loss": of_stages[-1][0],
            "step_s": means["step_s"],
            "boundaries": self.model.boundaries,
            "figures": self._figures,
        }

    @torch.no_grad()
    def validate(self) -> float:
        self.model.layers.eval()
        losses = [self.held_out_loss(number) for number in range(self.config.training.validation_batches)]
        self.model.layers.train()
        return statistics.fmean(of_all_ranks(losses, self.process_group)[-1])

    def held_out_loss(self, number: int) -> float:
        inputs, target = self.batches.validation(number)
        outputs = self.model.evaluate(inputs)
        return math.nan if outputs is None else self._case.loss(outputs, target).item()

    def state(self) -> dict[str, Any]:
        boundaries, case = self.model.boundaries, self._case.state_dict()
        chosen = self.config.pipeline.boundaries
        return {**super().state(), "chosen": chosen, "boundaries": boundaries, "case": case}

    def load_state(self, state: dict[str, Any]) -> None:
        self._case.load_state_dict(state["case"])

    def summary(self) -> dict[str, Any]:
        step_s = self.settled().get("step_s", math.nan)
        return {
            "step_s": step_s,
            "tokens_per_s": self.config.training.batch_size * self.config.model.context / step_s,
            "moves": self._num_moves,
            "boundaries": self.model.boundaries,
            "stages": dict(enumerate(stage_names(self.model.boundaries))),
            "figures": self._figures,
        }

    @staticmethod
    def needs_of(config: RunConfig, num_ranks: int) -> tuple[dict[str, list[Needs]], list[str]]:
        boundaries = first_boundaries(config.pipeline.boundaries, config.layers("meta"), num_ranks)
        strategy = Strategy(pp=num_ranks, boundaries=boundaries)
        return {
            f"case {config.case.name}, {config.pipeline.schedule}": rank_needs(config, strategy, strategy, num_ranks)
        }, []

    def _boundaries(self, layers: list[nn.Module], num_stages: int, state: dict[str, Any] | None) -> tuple[int, ...]:
        """Those of the checkpoint, where it is of as many stages and nobody has chosen others since."""
        if state is not None and len(state["boundaries"]) == num_stages + 1:
            before = state["chosen"]
            if (tuple(before) if isinstance(before, list) else before) == self.config.pipeline.boundaries:
                return tuple(state["boundaries"])
        return first_boundaries(self.config.pipeline.boundaries, layers, num_stages)

    def _tell(self, change: ChangeRecord | ProfileRecord) -> None:
        """What the balancer has done or measured."""
        self._num_moves += isinstance(change, ChangeRecord) and change.is_made
        if self.record is not None:
            self.record.write("pipeline", {**change.to_dict(), "step": self.step})
            status = replace(self.balancer.status(), step=self.step, step_s=change.step_s)
            self.record.write("status", status.to_dict())
