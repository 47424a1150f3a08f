"""Ranks of different memory: units are divided by it from the start, and no rank is given more than it may hold."""

import pytest
import torch
from helpers.processes import for_each
from helpers.virtual_training import FEATURES, Run

pytestmark = pytest.mark.same_ranks

#: Bytes of weights, gradients and Adam's moments of an even share of two ranks' 192 neurons, and of what all hold.
OF_EVEN_SHARE, FIXED = 16 * 96 * (2 * FEATURES + 1), 16 * FEATURES


def num_neurons(run):
    return run.model.up.local_weight.shape[0]


def bytes_in_training(run):
    """Of weights, gradients and optimizer state, by what is there between backward and the next step."""
    run.model(run.x).square().mean().backward()
    parameters = list(run.model.parameters())
    held = [*parameters, *(one.grad for one in parameters)]
    held += [value for state in run.optimizer.state.values() for value in state.values() if value.dim()]
    run.optimizer.zero_grad()
    return sum(one.nbytes for one in held)


def test_each_rank_fills_its_memory_alike_from_the_start(run_ranks):
    def train(rank, group):
        run = Run(group, mode="exact", memory_limits=(3.6e5, 1.8e5), update_every=2)
        begun = num_neurons(run)
        run.steps(6)
        memory = run.balancer.metrics()["balance/memory_bytes"]
        return begun, memory, bytes_in_training(run)

    (first, *_), (second, *_) = results = run_ranks(train, 2)
    assert first + second == 192 and first / second == pytest.approx(2.0, rel=0.03)
    for _, memory, counted in results:
        activations = memory - counted
        assert 0 < activations < 0.15 * memory  # the rest is counted to the byte


def test_units_move_where_activations_turn_out_not_to_fit(run_ranks):
    """Nobody is slow: it is for memory alone."""

    def train(rank, group):
        limits = (1e9, FIXED + 1.05 * OF_EVEN_SHARE)
        run = Run(group, mode="exact", memory_limits=limits, shares=(1.0, 1.0), update_every=1)
        run.x = torch.randn(200, FEATURES)
        before = num_neurons(run)
        run.steps(6)
        return before, num_neurons(run), run.balancer.metrics()["balance/memory_bytes"], limits[rank]

    first, second = run_ranks(train, 2)
    assert first[0] == second[0] == 96 and second[1] < 96
    assert second[2] <= second[3] * 1.02  # counted before the move


def test_home_and_a_move_by_hand_must_fit(run_ranks):
    def train(rank, group):
        limits = (1e9, FIXED + 0.8 * OF_EVEN_SHARE)
        run = Run(group, mode="exact", memory_limits=limits)
        before = num_neurons(run)
        with pytest.raises(ValueError, match=r"move\(\[0\.5, 1\.5\]\) is not allowed by memory_limits: rank 1 would"):
            run.balancer.move([1, 3])
        with pytest.raises(ValueError, match=r"at_home\(\) is not allowed by memory_limits"), run.balancer.at_home():
            pass
        run.balancer.move([3, 1])
        return before, num_neurons(run)

    (_, first), (before, second) = run_ranks(train, 2)
    assert before < 77 and (first, second) == (144, 48)


def test_what_cannot_fit_is_refused_on_every_rank(run_ranks):
    cases = [
        ({"memory_limits": (1e5, 1e5)}, "activations not counted: rank 0 would hold .* bytes of at most 100,000"),
        ({"memory_limits": (1e9, 1e5), "shares": (1.0, 1.0)}, "rank 1 would hold .* of at most 100,000"),
        ({"memory_limits": (1e9,)}, "numbers of bytes for 1 ranks, and the group has 2"),
    ]

    @for_each(cases)
    def train(rank, group, config, message):
        with pytest.raises(ValueError, match=message):
            Run(group, mode="exact", **config)

    run_ranks(train, 2)


def test_a_checkpoints_division_that_does_not_fit_is_not_taken_over(run_ranks):
    def train(rank, group):
        saved = Run(group, mode="exact", shares=(1.0, 3.0), memory_limits=(1e9, 1e9))
        saved.steps(3)
        state = saved.balancer.state_dict()
        saved.balancer.close()
        run = Run(group, mode="exact", memory_limits=(1e9, FIXED + 1.2 * OF_EVEN_SHARE))
        before = num_neurons(run)
        run.balancer.load_state_dict(state)
        return before, num_neurons(run)

    (first, loaded), (second, also) = run_ranks(train, 2)
    assert (first, second) == (loaded, also)
