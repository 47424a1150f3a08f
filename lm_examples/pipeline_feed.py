"""A GPT in a pipeline whose layers move: what balancing adds is ``PipelineBalancer`` and ``with balancer.step()``."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lm_examples.build import build_layers, first_boundaries, stage_names
from lm_examples.data import Text, batches_of, load_text
from lm_examples.feed import Feed
from lm_examples.pace import Pace
from lm_examples.pipeline_config import RunConfig
from vit_examples.harness.config_reader import plain
from vit_examples.harness.dry_run import Needs
from vit_examples.harness.program import of_all_ranks
from zeroresize.pipeline import Pipeline, PipelineBalancer, ProfileRecord, RebalancingRecord, clip_grad_norm_
from zeroresize.pipeline.first_boundaries import num_parameters
from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.centralized import balanced_partition
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad


class CountedBlocks:
    """Adds up the ``work`` of blocks over the micro-batches of a step, by hooks. Evaluation does not count.

    Args:
        blocks: modules with an attribute ``work``, a number.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._work: dict[nn.Module, float] = {}
        for block in blocks:
            self._work[block] = 0.0
            block.register_forward_hook(self._add)

    def __call__(self, layer: nn.Module) -> float:
        """Return the work of a layer since it was last asked for; 1 for anything but a block, as it never changes."""
        work = self._work.get(layer, 1.0)
        if layer in self._work:
            self._work[layer] = 0.0
        return work

    def _add(self, block: Any, inputs: Any, outputs: Any) -> None:
        if block.training:
            self._work[block] += block.work


class PipelineFeed(Feed):
    """Stages of layers, of which each step trains micro-batches; ``pipeline.jsonl`` has profiles and moves."""

    config: RunConfig
    model: Pipeline
    files = ("pipeline",)

    def __init__(
        self, config: RunConfig, data: Text, process_group: ProcessGroup, state: dict[str, Any] | None
    ) -> None:
        super().__init__(config, data, process_group, state)
        self._case, training, balance = config.make_case(), config.training, config.balance
        layers = build_layers(config, self._case)
        self._batches = batches_of(config, data)
        self.model = Pipeline(
            layers,
            self._case.loss,
            num_microbatches=training.micro_batches,
            process_group=process_group,
            boundaries=self._boundaries(layers, process_group.size(), state),
            schedule=config.pipeline.schedule,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
        self._pace = Pace(config.sleep.forward_s)
        self._pace.hold_up(layers[1:-1])
        self._first_stage = self.model.stage  # re-packing may renumber the pipeline's
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._seconds_since: list[float] = []
        self._figures: dict[str, float] = {}
        self._num_moves, self._bubble_ratio = 0, math.nan
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
    def load_data(config: RunConfig) -> tuple[Text, str]:
        text = load_text(config)
        return text, text.digest

    @staticmethod
    def layout_of(config: RunConfig) -> dict[str, Any]:
        values = plain(config)
        layout = {"model": values["model"], "dtype": config.training.dtype, "case": values["case"]}
        return json.loads(json.dumps(layout))

    @property
    def title(self) -> str:
        config = self.config
        return f"{config.case.name}, {self.model.num_stages} stages, balance {config.balance.mode}"

    @property
    def process_group(self) -> ProcessGroup:
        return self.model.process_group

    @property
    def is_released(self) -> bool:
        return self.model.is_released

    def train_step(self) -> None:
        """Forward, backward and the optimizer's step; between them layers may move, and this rank may be released."""
        begin = time.perf_counter()
        self._pace.chi = self.config.straggler.chi_of(self.step, self._first_stage)
        inputs, target = self._batches.training(self.step)
        self.optimizer.zero_grad()
        with nullcontext() if self.balancer is None else self.balancer.step():
            loss = self.model.step(inputs, target=target)
            step_loss = None if loss is None else loss.item()
            if self.config.repack.is_on:  # the last stage may be released with what it knows
                step_loss = of_all_ranks(step_loss, self.process_group)[-1]
        if self.is_released:
            return
        if self.config.training.grad_clip > 0.0:
            clip_grad_norm_(self.model, self.config.training.grad_clip)
        self.optimizer.step()
        is_last_stage = self.model.stage == self.model.num_stages - 1
        has_changed = self._case.after_step(self.model, self.optimizer, self.step, step_loss if is_last_stage else None)
        if has_changed and self.balancer is not None:
            self.balancer.profile_next()
        self._losses += [] if step_loss is None else [step_loss]
        self._seconds_since.append(time.perf_counter() - begin)
        self._seconds.append(self._seconds_since[-1])

    def numbers(self) -> dict[str, Any]:
        since_s, slept_s = sum(self._seconds_since), self._pace.lap()
        idle = 1.0 - slept_s / since_s if self._pace.sleeps_for_work and since_s else math.nan
        of_stages = of_all_ranks((self._losses, self._case.figures(self.model), idle), self.process_group)
        by_name: dict[str, list[float]] = {}
        for _, figures, _ in of_stages:
            for name, value in figures.items():
                by_name.setdefault(name, []).append(value)
        self._figures = {name: _mean(values) for name, values in by_name.items()}
        numbers: dict[str, Any] = {"loss": _mean(of_stages[-1][0]), "step_s": _mean(self._seconds_since)}
        if self._pace.sleeps_for_work:
            numbers["bubble_ratio"] = _mean([idle for *_, idle in of_stages])
        self._losses, self._seconds_since = [], []
        return {**numbers, "boundaries": self.model.boundaries, "figures": self._figures}

    @torch.no_grad()
    def validate(self) -> float:
        losses: list[float] = []
        self.model.layers.eval()
        for number in range(self.config.training.validation_batches):
            inputs, target = self._batches.validation(number)
            outputs = self.model.evaluate(inputs)
            if outputs is not None:
                losses.append(self._case.loss(outputs, target).item())
        self.model.layers.train()
        return _mean(of_all_ranks(losses, self.process_group)[-1])

    def state(self) -> dict[str, Any]:
        boundaries, case = self.model.boundaries, self._case.state_dict()
        chosen = self.config.pipeline.boundaries
        return {**super().state(), "chosen": chosen, "boundaries": boundaries, "case": case}

    def load_state(self, state: dict[str, Any]) -> None:
        self._case.load_state_dict(state["case"])

    def summary(self) -> dict[str, Any]:
        seconds = self._seconds[1:] or self._seconds
        tokens = self.config.training.batch_size * self.config.model.context
        return {
            "step_s": statistics.median(seconds) if seconds else math.nan,
            "mean_step_s": _mean(seconds),
            "tokens_per_s": tokens / _mean(seconds),
            "bubble_ratio": self._bubble_ratio,
            "moves": self._num_moves,
            "boundaries": self.model.boundaries,
            "stages": dict(enumerate(stage_names(self.model.boundaries))),
            "figures": self._figures,
        }

    @staticmethod
    def needs_of(config: RunConfig, num_ranks: int) -> tuple[dict[str, list[Needs]], list[str]]:
        layers = build_layers(config, config.make_case(), "meta")
        partition = Partition(first_boundaries(config, layers, num_ranks))
        itemsize = getattr(torch, config.training.dtype).itemsize
        needs = []
        for stage, name in enumerate(stage_names(partition.boundaries)):
            numbers = partition.layers_of(stage)
            parameters = sum(num_parameters(layers[number]) for number in numbers)
            weights = sum(_weight_bytes(layers[number]) for number in numbers)
            activations = micro_batches_held(config, stage, num_ranks) * sum(
                activation_bytes(config, number) for number in numbers
            )
            optimizer = 2 * parameters * itemsize
            needs.append(Needs(name, parameters, weights, parameters * itemsize, optimizer, activations))
        over = _over_limits(config, layers, partition)
        notes = [
            f"stage {stage} is over its limit (balance.memory_limits): layers leave it at the first profile"
            for stage in over
        ]
        return {f"case {config.case.name}, {config.pipeline.schedule}": needs}, notes

    def _boundaries(self, layers: list[nn.Module], num_stages: int, state: dict[str, Any] | None) -> tuple[int, ...]:
        """Those of the checkpoint, where it is of as many stages and nobody has chosen others since."""
        if state is not None and len(state["boundaries"]) == num_stages + 1:
            before = state["chosen"]
            if (tuple(before) if isinstance(before, list) else before) == self.config.pipeline.boundaries:
                return tuple(state["boundaries"])
        return first_boundaries(self.config, layers, num_stages)

    def _tell(self, change: RebalancingRecord | ProfileRecord) -> None:
        """What the balancer has done or measured."""
        if isinstance(change, ProfileRecord):
            self._bubble_ratio = change.bubble_ratio
        else:
            self._num_moves += 1
        if self.record is not None:
            self.record.write("pipeline", {**change.to_dict(), "step": self.step})


def activation_bytes(config: RunConfig, number: int) -> int:
    """Estimate of what forward of layer ``number`` keeps for backward, of one micro-batch, with all work done.

    Of each token: of a block the inputs, normalised inputs and outputs of both layer norms and of the attention (5 D),
    q, k and v (3 D), and the outputs of the first product and of GELU (2 M); of the head its norm's input and output
    (2 D) and the logits (V), which belong to the loss; of the embedding the number of the token.
    """
    model, training = config.model, config.training
    itemsize = getattr(torch, training.dtype).itemsize
    tokens = training.batch_size // training.micro_batches * model.context
    if number == 0:
        return tokens * torch.int64.itemsize
    if number == config.num_layers - 1:
        return tokens * (2 * model.hidden_size + model.vocabulary) * itemsize
    return tokens * (8 * model.hidden_size + 2 * model.feed_forward_size) * itemsize


def micro_batches_held(config: RunConfig, stage: int, num_stages: int) -> int:
    """Of how many micro-batches a stage keeps activations at once, at most."""
    most = config.training.micro_batches
    return most if config.pipeline.schedule == "gpipe" else min(most, num_stages - stage)


def _over_limits(config: RunConfig, layers: Sequence[nn.Module], partition: Partition) -> list[int]:
    """The stages that have too little memory for their first layers.

    Activations count as if each stage held as many micro-batches as the first one, as the balancer counts them.

    Raises:
        ValueError: if no boundaries fit into the limits.
    """
    limits = config.balance.memory_limits
    if limits is None or not config.balance.is_on:
        return []
    itemsize = getattr(torch, config.training.dtype).itemsize
    held = micro_batches_held(config, 0, partition.num_stages)
    layer_bytes = [
        _weight_bytes(layer) + 3 * num_parameters(layer) * itemsize + held * activation_bytes(config, number)
        for number, layer in enumerate(layers)
    ]
    load = PipelineLoad.of(layer_bytes, partition.num_stages, layer_bytes=layer_bytes, memory_limits=limits)
    try:
        balanced_partition(load)
    except ValueError as error:
        raise ValueError(f"balance.memory_limits: {error}") from error
    return [stage for stage, size in enumerate(load.stage_bytes(partition)) if size > limits[stage]]


def _weight_bytes(layer: nn.Module) -> int:
    return sum(one.nbytes for one in (*layer.parameters(), *layer.buffers()))


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
