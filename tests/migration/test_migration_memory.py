"""Migration's memory: the same in every step, however forwards and backwards follow each other, and what is documented.

``T`` tokens, ``K`` input and ``N`` output features on a rank, ``L`` columns lent, ``m`` of them to each receiver.
"""

import pytest
import torch
from helpers.parallel_layers import PAIR_HIDDEN, PAIR_IN, Pair, equal_loans, lend, randn
from torch.utils.checkpoint import checkpoint

from zeroresize.config.keys import MIGRATION_TRANSPORTS
from zeroresize.migration.buffers import Buffers

STEPS = 20


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


def batches_of_any_size(model, layers, step):
    loss(model, layers, step, num_tokens=(9, 2, 5, 7)[step % 4]).backward()


ORDERS = [accumulate, all_forwards_first, recompute, forwards_without_backward, backward_twice, batches_of_any_size]


@pytest.mark.few(2)
@pytest.mark.parametrize("migration_transport", MIGRATION_TRANSPORTS)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_what_is_kept_lies_where_it_lay_in_the_first_step_and_gradients_are_exact(
    run_ranks, monkeypatch, migration_transport, order
):
    """Other tensors take whatever memory is freed meanwhile, so what is allocated anew lies elsewhere."""

    def train(rank, group):
        kept, others, keep = [], [], Buffers.keep

        def recorded(buffers, tensor):
            copied = keep(buffers, tensor)
            kept[-1].add(copied.data_ptr())
            return copied

        monkeypatch.setattr(Buffers, "keep", recorded)
        model, held, errors = Pair(group, torch.float64), [], []
        lender = lend(model.layers(), group, equal_loans({0: 0.5}, 2), migration_transport)
        for step in range(STEPS):
            kept.append(set())
            for layers in (model.whole, model.parallel):
                order(model, layers, step)
            errors.append(model.worst_error(group))
            model.zero_grad()
            lender.send_weights()
            held.append(lender.bytes_held)
            others += [torch.empty(num_tokens * 9, dtype=torch.float64) for num_tokens in (9, 2, 5, 5, 7)]
        return max(errors), held, kept

    for rank, (error, held, kept) in enumerate(run_ranks(train, 2)):
        assert error <= 1e-10
        assert held == held[:1] * STEPS
        assert all(addresses <= kept[0] for addresses in kept)
        assert bool(kept[0]) == (rank == 1)


@pytest.mark.parametrize("num_receivers", [1, 2])
@pytest.mark.parametrize("migration_transport", MIGRATION_TRANSPORTS)
def test_the_memory_is_what_is_documented(run_ranks, migration_transport, num_receivers):
    """After a step of a column-parallel [N₁, K₁] and a row-parallel layer [N₂, K₂]."""
    num_ranks, num_tokens = num_receivers + 1, 5
    (n1, k1), (n2, k2) = (PAIR_HIDDEN // num_ranks, PAIR_IN), (PAIR_IN, PAIR_HIDDEN // num_ranks)
    l1, l2 = k1 // 2, k2 // 2
    m1, m2 = l1 // num_receivers, l2 // num_receivers

    def train(rank, group):
        model = Pair(group, torch.float64, layers=1)
        lender = lend(model.layers(), group, equal_loans({0: 0.5}, num_ranks), migration_transport)
        loss(model, model.parallel, 0, num_tokens).backward()
        return lender.bytes_held / 8

    whole = num_receivers > 1  # several parts are put side by side
    reduces = whole and migration_transport == "broadcast-reduce"
    lent_weights, lent_x = n1 * l1 + n2 * l2, num_tokens * l2
    owner = lent_weights + lent_x  # packed
    owner += (1 + whole) * (lent_weights + lent_x)  # dw and the row-parallel layer's dx, come home
    owner += 0 if reduces else num_receivers * num_tokens * n1  # parts of y
    receiver = num_tokens * m2  # kept from forward to backward
    receiver += num_tokens * n1  # dy
    receiver += n1 * m1 + n2 * m2  # dw, on its way home
    if migration_transport == "broadcast-reduce":
        receiver += lent_weights + lent_x + num_tokens * m2  # the row-parallel layer's dx, on its way home
    else:
        receiver += n1 * m1 + n2 * m2 + num_tokens * m2 + num_tokens * max(m1, m2)
        owner += lent_weights + lent_x  # one packed part a receiver
        owner += num_receivers * num_tokens * max(0, n2 - n1)  # parts of y of either layer
        owner += (1 + whole) * num_tokens * max(0, l1 - l2)  # the column-parallel layer's dx, too
    assert run_ranks(train, num_ranks) == [owner] + [receiver] * num_receivers
