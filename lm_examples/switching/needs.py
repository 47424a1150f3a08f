"""What ranks need under each strategy, counted with the model on torch's meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lm_examples.pipeline_stages import stage_names
from lm_examples.switching.config import RunConfig
from lm_examples.switching.search import candidates_of
from vit_examples.harness.dry_run import Needs
from zeroresize.plan.strategy import Strategy


def needs_of(config: RunConfig, num_ranks: int) -> dict[Strategy, list[Needs]]:
    """[R] of each rank, by strategy; of all that a search could find, each as the optimizer's."""
    if config.strategies.search:
        return {one: rank_needs(config, one, one, num_ranks) for one in candidates_of(config, num_ranks)}
    used = dict.fromkeys([config.optimizer_strategy, *(each.strategy for each in config.ranges)])
    return {strategy: rank_needs(config, strategy, config.optimizer_strategy, num_ranks) for strategy in used}


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
            raise ValueError(
                f"strategies.memory_limit={limit:g}: rank {rank} needs {total / 1e6:,.1f} MB under {strategy}: "
                "choose more tp or pp, another strategy of the optimizer, or smaller training.max_tokens"
            )
