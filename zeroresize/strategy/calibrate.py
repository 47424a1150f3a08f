"""Measuring what the layers of a switchable model cost on the machine that trains it, and how fast its links are."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from zeroresize.comm.collectives import group_rank, group_size
from zeroresize.measure.links import measure_messages
from zeroresize.measure.memory_meter import SavedBytes
from zeroresize.policy.strategy.costs.cost_model import LayerCost, LayerCostTable
from zeroresize.policy.strategy.packing import Floats
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds
from zeroresize.resharding.agreement import meet_over
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.packed import Packed
from zeroresize.utils.progress import Progress
from zeroresize.utils.torch_state import seconds_when_done
from zeroresize.utils.value_checks import at_least

logger = logging.getLogger(__name__)

#: The lengths that are timed: the longest one, and these parts of it.
_PARTS = (1, 4, 16)
_REPETITIONS = 3


def measured_points(longest: int, max_tokens: int) -> list[tuple[int, ...]]:
    """Return the lengths of micro-batches to time, fewest tokens first: one sequence, and as many as there is room for.

    They reach as far as training does, so that nothing is extrapolated. Equal tokens in sequences of different lengths
    tell b and c apart.

    Args:
        longest: sequence.
        max_tokens: of a micro-batch.

    Raises:
        ValueError: for no tokens, or no room for the longest sequence.
    """
    at_least("longest", longest, 1)
    at_least("max_tokens", max_tokens, longest)
    lengths = [max(longest // part, 1) for part in _PARTS]
    counts = dict.fromkeys((length, count) for length in lengths for count in (1, max_tokens // length))
    return sorted(((length,) * count for length, count in counts), key=lambda point: (sum(point), point))


def fitted_cost(tokens: Sequence[float], squares: Sequence[float], seconds: Floats, token_bytes: float) -> LayerCost:
    """Fit a layer's seconds a + b · tokens + c · Σ length² with a, b and c not negative.

    The sum of squared relative errors is the least possible.

    Args:
        tokens, squares: of each point.
        seconds: of each point, above 0.

    Raises:
        ImportError: without SciPy.
    """
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise ImportError("fitting the costs of layers needs SciPy: pip install 'zeroresize[search]'") from error
    columns = np.stack([np.ones(len(tokens)), np.asarray(tokens), np.asarray(squares)], axis=1).astype(np.float64)
    scale = columns.max(axis=0)
    coefficients = nnls(columns / scale / seconds[:, None], np.ones(len(seconds)))[0] / scale
    return LayerCost(float(coefficients[0]), float(coefficients[1]), float(coefficients[2]), token_bytes)


def measure_layer_costs(
    model: SwitchableModel,
    batch_of: Callable[[Sequence[int]], Packed],
    *,
    longest: int,
    max_tokens: int | None = None,
    memory_limit: float = math.inf,
) -> LayerCostTable:
    """Measure the layers under every tensor-parallel degree of the model's strategies that have one stage.

    Collective, between steps: the model switches to each of these strategies and back to the optimizer's strategy.
    Every layer is timed by itself, forward and backward, on all replicas at once; the fastest of a few times counts,
    and of the ranks the slowest. All ranks get the same numbers.

    Args:
        batch_of: a micro-batch of sequences of these lengths, on the model's device.
        longest: sequence of training; costs of longer ones are extrapolated.
        max_tokens: of a micro-batch of training; None for as many as the longest sequence has.
        memory_limit: bytes of a rank: micro-batches with which a layer would need more are not measured.

    Raises:
        ValueError: if no strategy has one stage and all ranks, or gradients are there, for lengths as
            :func:`measured_points`, and if not even the smallest micro-batch fits.
    """
    num_ranks = group_size(model.process_group)
    by_degree = {way.tp: way for way in model.strategies if way.pp == 1 and way.num_ranks == num_ranks}
    if not by_degree:
        raise ValueError(
            f"none of the strategies {list(map(str, model.strategies))} has one stage and all ranks: layers are "
            "measured under such ones; add one for each tensor-parallel degree"
        )
    if _most([float(any(each.grad is not None for each in model.parameters()))], model)[0]:
        raise ValueError("layers are measured between steps: there are gradients; call optimizer.zero_grad() first")
    points = measured_points(longest, longest if max_tokens is None else max_tokens)
    batches = [batch_of(lengths) for lengths in points]
    tokens = [sum(lengths) for lengths in points]
    squares = [sum(length**2 for length in lengths) for lengths in points]
    kinds = [f"layer {number}" for number in range(model.num_layers)]
    costs: dict[str, dict[int, LayerCost]] = {kind: {} for kind in kinds}
    boundary_bytes = 0.0
    is_first = group_rank(model.process_group) == 0
    what = "measuring layers: tensor-parallel degrees"
    with Progress(what, len(by_degree), tell=logger.info, is_shown=is_first) as progress:
        for tp, strategy in sorted(by_degree.items()):
            model.switch_to(strategy, gradients=False)
            layers = [model.stage_layers[number] for number in range(model.num_layers)]
            *kept_bytes, _ = _token_bytes(layers, batches[0], model)
            most, held = _most([max(kept_bytes), model.held_bytes], model).tolist()
            fitting = [number for number in range(len(points)) if held + most * tokens[number] <= memory_limit]
            if not fitting:
                model.switch_to(model.optimizer_strategy, gradients=False)
                raise ValueError(
                    f"memory_limit={memory_limit:g}: under {strategy} a rank has {held:.0f} bytes of weights, and not "
                    f"even a micro-batch of {tokens[0]} tokens fits beside them"
                )
            *kept_bytes, boundary_bytes = _most(_token_bytes(layers, batches[fitting[-1]], model), model).tolist()
            repetitions = [[_timed(layers, batches[number], model) for number in fitting] for _ in range(_REPETITIONS)]
            seconds_PL = np.min(repetitions, axis=0)
            seconds_LP = _most(seconds_PL.ravel().tolist(), model).reshape(seconds_PL.shape).T
            tokens_P, squares_P = ([column[number] for number in fitting] for column in (tokens, squares))
            for kind, seconds, kept in zip(kinds, seconds_LP, kept_bytes, strict=True):
                costs[kind][tp] = fitted_cost(tokens_P, squares_P, seconds, kept)
            progress.advance()
    model.switch_to(model.optimizer_strategy, gradients=False)
    return LayerCostTable(tuple(kinds), costs, boundary_bytes)


def measure_links(model: SwitchableModel) -> LinkSpeeds:
    """Measure the slowest rank's link while all send to their neighbours at once; collective.

    Links between nodes are not told apart from those within. A network between nodes that is slower makes both as slow:
    the safe side for deciding whether a switch pays.
    """
    messages = measure_messages(model.process_group, model.device)
    speed = 1.0 / max(messages.seconds_per_byte, 1e-15)
    return LinkSpeeds(speed, speed, messages.fixed_s)


def _timed(layers: Sequence[nn.Module], batch: Packed, model: SwitchableModel) -> list[float]:
    """[L] seconds of forward and backward of each layer."""
    seconds, x = [], batch.tokens
    for layer in layers:
        began = seconds_when_done(model.device)
        x = _both_ways(layer, x, batch)
        seconds.append(seconds_when_done(model.device) - began)
        model.drop_gradients()
    return seconds


def _both_ways(layer: nn.Module, x: Tensor, batch: Packed) -> Tensor:
    """Forward and backward; returns the output, without a graph."""
    given = x.detach().requires_grad_(x.is_floating_point())
    y: Tensor = layer(given, batch)
    if y.requires_grad:
        y.backward(torch.ones_like(y))
    return y.detach()


def _token_bytes(layers: Sequence[nn.Module], batch: Packed, model: SwitchableModel) -> list[float]:
    """[L + 1] bytes of a token that each layer keeps for its backward, and those of what the first one hands on."""
    sizes, x, handed = [], batch.tokens, 0
    for layer in layers:
        saved = SavedBytes(layer, [x])
        try:
            x = _both_ways(layer, x, batch)
        finally:
            saved.end()
        model.drop_gradients()
        sizes.append(saved.total)
        handed = handed or x.nbytes
    return [num_bytes / batch.num_tokens for num_bytes in (*sizes, handed)]


def _most(values: Sequence[float], model: SwitchableModel) -> Floats:
    """The largest of all ranks."""
    most: Floats = np.max(meet_over(model.process_group, model.device)(*values), axis=0)
    return most
