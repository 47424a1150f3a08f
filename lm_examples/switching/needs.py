"""What ranks need under each strategy, counted with the model on torch's meta device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from lm_examples.pipeline_stages import stage_names
from lm_examples.switching.config import RunConfig
from lm_examples.switching.search import candidates_of
from vit_examples.harness.dry_run import Needs
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.costs.cost_model import switch_bytes
from zeroresize.policy.strategy.switches.switch_plan import plan_gradients, plan_weights


def needs_of(config: RunConfig, num_ranks: int) -> dict[Strategy, list[Needs]]:
    """[R] of each rank, by strategy; of all that a search could find, each as the optimizer's."""
    if config.strategies.search:
        return {one: rank_needs(config, one, one, num_ranks) for one in candidates_of(config, num_ranks)}
    used = list(dict.fromkeys([config.optimizer_strategy, *(one.strategy for one in config.ranges)]))
    switches = _switch_bytes(config, used, num_ranks)
    return {
        strategy: [replace(own, switch=size) for own, size in zip(needs, switches[strategy], strict=True)]
        for strategy in used
        for needs in [rank_needs(config, strategy, config.optimizer_strategy, num_ranks)]
    }


def _switch_bytes(config: RunConfig, used: Sequence[Strategy], num_ranks: int) -> dict[Strategy, list[int]]:
    """[R] of each strategy, the most that the switches from and to it take; 0 for the only one."""
    tensors, nodes = config.tensors(), [0] * num_ranks
    layouts = {one: one.layout(tensors, num_ranks, config.num_layers) for one in used}
    sizes = {one: own.rank_bytes(tensors) for one, own in layouts.items()}
    most = {one: np.zeros(num_ranks, dtype=np.int64) for one in used}
    optimizer_strategy = config.optimizer_strategy
    for before, after in itertools.permutations(used, 2):
        plans = [plan_weights(layouts[before], layouts[after], tensors, nodes)]
        if before != optimizer_strategy:
            plans.append(plan_gradients(layouts[before], layouts[optimizer_strategy], tensors, nodes))
        num_bytes = switch_bytes(
            sizes[before],
            sizes[after],
            sizes[optimizer_strategy],
            plans,
            is_optimizer_strategy=before == optimizer_strategy,
        )
        if config.training.compute_dtype is not None:  # copies are switched, and masters are there besides
            part = config.training.computing_dtype.itemsize / tensors[0].itemsize
            num_bytes = num_bytes + sizes[optimizer_strategy] - (1.0 - part) * (sizes[before] + sizes[after])
        for end in (before, after):
            most[end] = np.maximum(most[end], num_bytes.astype(np.int64))
    return {one: own.tolist() for one, own in most.items()}


def rank_needs(config: RunConfig, strategy: Strategy, optimizer_strategy: Strategy, num_ranks: int) -> list[Needs]:
    """[R] of each rank while ``strategy`` is in force."""
    tensors, partition = config.tensors(), strategy.partition(config.num_layers)
    here, of_optimizer = (
        held_under.layout(tensors, num_ranks, config.num_layers).rank_bytes(tensors).tolist()
        for held_under in (strategy, optimizer_strategy)
    )
    names = stage_names(partition.boundaries)
    tokens = config.max_tokens_of(strategy)
    needs = []
    for rank in range(num_ranks):
        gradients = here[rank] + (of_optimizer[rank] if strategy != optimizer_strategy else 0)
        weights = here[rank]
        if config.training.compute_dtype is not None:
            part = config.training.computing_dtype.itemsize / tensors[0].itemsize
            weights = round(part * here[rank]) + of_optimizer[rank]
        position = strategy.position_of(rank)
        layers, activations = "left out", 0.0
        if position is not None:
            share = (strategy.shares[position.shard] if strategy.shares else 1.0) / strategy.tp
            stage_layers = partition.layers_of(position.stage)
            layers = names[position.stage]
            activations = sum(token_bytes(config, number, share) for number in stage_layers) * tokens
            activations *= strategy.pp - position.stage
        parameters = here[rank] // tensors[0].itemsize
        needs.append(Needs(layers, parameters, weights, gradients, 2 * of_optimizer[rank], round(activations)))
    return needs


def token_bytes(config: RunConfig, number: int, share: float = 1.0) -> float:
    """Estimate of what forward of layer ``number`` keeps of one token for backward.

    Of a block the inputs, normalised inputs and outputs of both norms (6 D), and the rotary waves (head size). Of the
    rank's ``share`` of the heads and neurons: turned queries and keys (2 D), the product that values are part of (3 D;
    with fewer KV heads copies of the values, and of the keys, D (1 + KV heads / heads)), the attention's output and its
    copy (2 D); gate and up, SiLU's output and theirs together (4 M). Of the head its norm's (3 D) and the logits (V),
    which belong to the loss; of the embedding the number of the token.
    """
    model = config.model
    dtype = config.training.computing_dtype
    if number == 0:
        return torch.int64.itemsize
    if number == config.num_layers - 1:
        wide = torch.promote_types(dtype, torch.float32)
        return 3 * model.hidden_size * dtype.itemsize + model.vocabulary * wide.itemsize
    are_all = model.num_kv_groups == model.num_heads
    copied = 3.0 if are_all else 1.0 + model.num_kv_groups / model.num_heads
    divided = (4.0 + copied) * model.hidden_size + 4 * model.feed_forward_size
    return (6 * model.hidden_size + model.head_size + share * divided) * dtype.itemsize


def require_memory(config: RunConfig, needs: Mapping[Strategy, Sequence[Needs]]) -> None:
    """Raises ValueError, naming rank and strategy, where more than ``strategies.memory_limit`` is needed."""
    limit = config.strategies.memory_limit
    for strategy, of_ranks in needs.items():
        rank = max(range(len(of_ranks)), key=lambda one: of_ranks[one].total)
        total = of_ranks[rank].total
        if limit is not None and total > limit:
            where = "in switches from or to" if total == of_ranks[rank].switch else "under"
            raise ValueError(
                f"strategies.memory_limit={limit:g}: rank {rank} needs {total / 1e6:,.1f} MB {where} {strategy}: "
                "choose more tp or pp, another strategy of the optimizer, or smaller training.max_tokens"
            )
