"""Stragglers on demand slow the products of a model under DistributedDataParallel, and batches are divided by that."""

import torch
from helpers.on_ranks import gathered, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import zeroresize as zr

GLOBAL_BATCH, TOKENS, HIDDEN = 32, 48, 192


@on_ranks(2)
def test_a_rank_whose_products_are_slowed_is_given_fewer_samples(rank, group):
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(HIDDEN, HIDDEN), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options, changes, num_steps = {"global_batch": GLOBAL_BATCH, "update_every": 4}, [], 0
    balancer = zr.DataBalancer(model, optimizer, on_change=changes.append, process_group=group, **options)
    x = torch.randn(GLOBAL_BATCH, TOKENS, HIDDEN).repeat(200, 1, 1)
    with zr.StragglerInjector(model, process_group=group, chi={1: 6.0}) as injector:
        for rows in DataLoader(x, batch_sampler=balancer.sampler(x)):
            (model(rows).square().mean() * balancer.loss_scale()).backward()
            optimizer.step()
            optimizer.zero_grad()
            balancer.step()
            num_steps += 1
            if changes:  # after the same step on both ranks
                break
    assert injector.num_products == (0 if rank == 0 else num_steps * (3 + 3 + 2))  # y, dw and dx, but for the first dx
    assert (injector.seconds_added > 0.0) is (rank == 1)
    fast, slow = changes[0].after
    assert fast + slow == GLOBAL_BATCH and fast > 1.3 * slow
    assert gathered(group, changes[0].after) == [(fast, slow)] * 2
