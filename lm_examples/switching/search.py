"""Which strategy trains which lengths: as the configuration says, or what measurements on these ranks make fastest."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from lm_examples.documents import MiniBatches
from lm_examples.switching.config import RunConfig
from zeroresize.plan.strategy import LengthRange, Strategy
from zeroresize.policy.strategy.costs.cost_model import CostModel
from zeroresize.policy.strategy.costs.search import (
    SearchResult,
    candidate_strategies,
    default_thresholds,
    search_strategies,
)
from zeroresize.strategy.calibrate import measure_layer_costs, measure_links
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.packed import Packed
from zeroresize.utils.progress import Progress
from zeroresize.utils.texts import duration_text

_SHORTEST_RANGE = 64


@dataclass(frozen=True)
class Choice:
    """What a run is trained under.

    Attributes:
        result: of a search; None where the configuration says what is chosen.
    """

    ranges: tuple[LengthRange, ...]
    optimizer_strategy: Strategy
    result: SearchResult | None = None


def chosen(
    config: RunConfig,
    layers: Sequence[nn.Module],
    batches: MiniBatches,
    process_group: ProcessGroup,
    tell: Callable[[str], None] = lambda _: None,
) -> Choice:
    """The ranges and the optimizer's strategy of a run; collective, and the same on all ranks.

    Args:
        tell: is given a line of what is being done.

    Raises:
        ValueError: if no strategy fits into ``strategies.memory_limit``.
    """
    strategies = config.strategies
    if not strategies.search:
        return Choice(config.ranges, config.optimizer_strategy)
    began = time.perf_counter()
    num_ranks = dist.get_world_size(process_group)
    candidates = candidates_of(config, num_ranks)
    longest, max_tokens = config.data.max_length, config.training.max_tokens
    limit = strategies.memory_limit or sys.float_info.max
    degrees = ", ".join(str(one.tp) for one in candidates if one.pp == 1)
    tell(f"search: measuring {len(layers)} layers under tp = {degrees}, and links")
    compute_dtype = None if config.training.compute_dtype is None else config.training.computing_dtype
    model = SwitchableModel(
        layers,
        strategies=[one for one in candidates if one.pp == 1],
        process_group=process_group,
        compute_dtype=compute_dtype,
    )
    layer_costs = measure_layer_costs(model, _batch_of, longest=longest, max_tokens=max_tokens, memory_limit=limit)
    tensors, optimizer_ratio = tuple(model.tensors), 2.0
    if compute_dtype is not None:  # what travels; master weights are of the optimizer's state then
        optimizer_ratio = 3.0 * max(one.itemsize for one in tensors) / compute_dtype.itemsize
        tensors = tuple(replace(one, itemsize=compute_dtype.itemsize) for one in tensors)
    cost = CostModel(layer_costs, tensors, (0,) * num_ranks, measure_links(model), optimizer_ratio)
    model.close()
    sample = [one.tolist() for one in batches.sample()]
    thresholds = default_thresholds(longest, _SHORTEST_RANGE)
    measured_s = time.perf_counter() - began
    tell(
        f"search: measured in {duration_text(measured_s)}; comparing {len(candidates)} strategies in ranges that end "
        f"at {', '.join(map(str, thresholds))} tokens, on {len(sample)} mini-batches"
    )
    with Progress("search: comparing strategies", tell=tell):
        result = search_strategies(
            sample,
            candidates,
            cost,
            memory_limit=limit,
            thresholds=thresholds,
            max_ranges=strategies.max_ranges,
            max_tokens=max_tokens,
        )
    tell(f"search: done after {duration_text(time.perf_counter() - began)}")
    return Choice(result.ranges, result.optimizer_strategy, result)


def candidates_of(config: RunConfig, num_ranks: int) -> list[Strategy]:
    """What a search chooses from: all degrees that divide the ranks, heads and neurons."""
    model = config.model
    return candidate_strategies(num_ranks, config.model.num_layers, [model.num_kv_groups, model.feed_forward_size])


def _batch_of(lengths: Sequence[int]) -> Packed:
    return Packed.of([torch.zeros(length + 1, dtype=torch.int64) for length in lengths])
