"""Migration's memory: the same in every step, however forwards and backwards follow each other."""

import pytest
import torch
from helpers.parallel_layers import PAIR_IN, Pair, equal_loans, lend, randn
from torch.utils.checkpoint import checkpoint

from zeroresize.config.keys import MIGRATION_TRANSPORTS
from zeroresize.migration.gradient_return import GradientReturn

STEPS = 4


def loss(model, layers, seed, num_tokens=5):
    return (
        model.run(layers, randn(num_tokens, PAIR_IN, seed=seed, dtype=torch.float64).requires_grad_()).square().mean()
    )


def accumulate(model, layers, step):
    for micro_batch in range(2):
        loss(model, layers, 2 * step + micro_batch).backward()


def all_forwards_first(model, layers, step):
    losses = [loss(model, layers, 3 * step + micro_batch) for micro_batch in range(3)]
    for loss_of_batch in (losses[1], losses[0], losses[2]):
        loss_of_batch.backward()


def recompute(model, layers, step):
    """As a whole, so that a recomputation keeps what several layers need."""
    for seed in (2 * step, 2 * step + 1):
        x = randn(5, PAIR_IN, seed=seed, dtype=torch.float64).requires_grad_()
        checkpoint(model.run, layers, x, use_reentrant=False).square().mean().backward()


def forwards_without_backward(model, layers, step):
    waiting = loss(model, layers, 2 * step)
    loss(model, layers, 2 * step + 1).backward()
    del waiting
    for _ in range(3):
        loss(model, layers, 2 * step)


def backward_twice(model, layers, step):
    first = loss(model, layers, 2 * step)
    first.backward(retain_graph=True)
    loss(model, layers, 2 * step + 1).backward()
    first.backward()


def gradients_of_the_input_alone(model, layers, step):
    """As for saliency maps: nobody asks for those of the weights."""
    x = randn(5, PAIR_IN, seed=step, dtype=torch.float64).requires_grad_()
    torch.autograd.grad(model.run(layers, x).square().mean(), x)
    accumulate(model, layers, step)


def batches_of_any_size(model, layers, step):
    loss(model, layers, step, num_tokens=(9, 2, 5, 7)[step % 4]).backward()


ORDERS = [all_forwards_first, recompute, forwards_without_backward, backward_twice, batches_of_any_size]
ORDERS.append(gradients_of_the_input_alone)


@pytest.mark.parametrize("migration_transport", MIGRATION_TRANSPORTS)
def test_nothing_that_is_held_grows_and_gradients_are_exact(run_ranks, migration_transport):
    def train(rank, group):
        for order in ORDERS:
            model, held, errors = Pair(group, torch.float64), [], []
            lender = lend(model.layers(), group, equal_loans({0: 0.5}, 2), migration_transport)
            for step in range(STEPS):
                for layers in (model.whole, model.parallel):
                    order(model, layers, step)
                errors.append(model.worst_error(group))
                model.zero_grad()
                lender.send_weights()
                held.append(lender.bytes_held)
            assert max(errors) <= 1e-10, order.__name__
            assert held == held[:1] * STEPS, order.__name__
            assert (held[0] > 0) == (rank == 1 or migration_transport == "scatter-gather"), order.__name__

    run_ranks(train, 2)


def test_a_wait_that_fails_leaves_nothing_of_the_other_transport_under_way():
    class Sender:
        def __init__(self, fails):
            self.fails, self.is_sending = fails, True

        def finish_sending(self):
            self.is_sending = False
            if self.fails:
                raise RuntimeError("connection closed by peer")

    first, second = Sender(True), Sender(False)
    with pytest.raises(RuntimeError, match="closed by peer"):
        GradientReturn((first, second)).finish_sending()
    assert not first.is_sending and not second.is_sending
