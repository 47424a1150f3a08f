"""What holds of every host beside fully_shard: what does not move is the host's, and moves are refused at once."""

import time

import pytest
import torch

import zeroresize as zr
from helpers.dtensor_comparisons import assert_same


def train_beside_host(host, model, loss_of, **options):
    """The balancer, in mode off, of a model that has trained for three steps as its host, bit for bit.

    ``loss_of`` is called with a model and the number of a step.
    """
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (host, model)]
    balancer = zr.Balancer(model, optimizers[1], config=zr.BalanceConfig(mode="off"), **options)
    for step in range(3):
        losses = []
        for each, optimizer in zip((host, model), optimizers, strict=True):
            loss = loss_of(each, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        balancer.step()
        assert losses[0] == losses[1]
    assert_same(list(model.parameters()), list(host.parameters()), "weights after training")
    return balancer


def assert_refused_at_once(balancer, error, why):
    """No unit moves, and the reason comes before a wait for other ranks could end."""
    began = time.perf_counter()
    with pytest.raises(error, match=why):
        balancer.move((3, 1))
    assert time.perf_counter() - began < 5
