"""Costs of layers, measured on real ranks, and fitted."""

import numpy as np
import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from helpers.strategies import WIDTH, layers_of

from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.calibrate import fitted_cost, measure_layer_costs, measure_links, measured_points
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.packed import Packed
from zeroresize.utils.torch_private import known_groups


def test_costs_are_found_again_and_never_negative():
    tokens, squares = np.array([1.0, 64, 64, 256]), np.array([1.0, 64**2, 4 * 16**2, 256**2])
    cost = fitted_cost(tokens, squares, 0.5 + 2.0 * tokens + 0.1 * squares, 3.0)
    assert (cost.fixed_s, cost.token_s, cost.square_s) == pytest.approx((0.5, 2.0, 0.1))
    falling = fitted_cost(tokens, squares, np.maximum(3.0 - 0.01 * tokens, 0.1), 3.0)
    assert min(falling.fixed_s, falling.token_s, falling.square_s) >= 0.0


def test_what_is_measured_reaches_as_far_as_training():
    points = measured_points(4096, 8192)
    assert (4096,) * 2 in points and max(map(sum, points)) == 8192
    assert (4096,) in points and (256,) * 32 in points and len({sum(one) for one in points}) >= 3
    assert measured_points(1, 1) == [(1,)]
    with pytest.raises(ValueError, match="max_tokens=15 is not allowed"):
        measured_points(16, 15)


@on_ranks(2)
def test_all_ranks_measure_the_same_and_lose_nothing(rank, group):
    model = SwitchableModel(layers_of(), strategies=[Strategy(dp=2), Strategy(tp=2)], process_group=group)
    before = [one.detach().clone() for one in model.parameters()]

    def batch_of(lengths):
        return Packed.of([torch.zeros(length + 1, dtype=torch.int64) for length in lengths])

    costs = measure_layer_costs(model, batch_of, longest=16)
    links = measure_links(model)
    after = list(model.parameters())
    assert all(map(torch.equal, before, after)) and all(one.grad is None for one in after)
    assert model.current == model.optimizer_strategy and costs.degrees == (1, 2)
    assert costs.boundary_bytes == WIDTH * 8
    whole, half = (costs.costs["layer 1"][tp] for tp in (1, 2))
    assert whole.token_bytes > half.token_bytes > whole.token_bytes / 2
    # An embedding keeps the numbers of tokens, a linear layer what it is given.
    assert [costs.costs[f"layer {number}"][1].token_bytes for number in (0, 3)] == [8, WIDTH * 8]
    assert whole.fixed_s + 16 * whole.token_s + 256 * whole.square_s > 0.0 and links.within_bytes_per_s > 0.0
    with pytest.raises(ValueError, match=r"memory_limit=1: under .* not even a micro-batch of 1 tokens fits"):
        measure_layer_costs(model, batch_of, longest=16, memory_limit=1.0)
    assert model.current == model.optimizer_strategy
    after[0].grad = torch.zeros_like(after[0]) if rank else None
    with pytest.raises(ValueError, match="there are gradients"):
        measure_layer_costs(model, batch_of, longest=16)
    model.close()
    assert len(known_groups()) == 1  # that of the job
    ranks = gathered(group, (costs, links))
    assert ranks[0] == ranks[1]
