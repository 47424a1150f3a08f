"""Accelerate's wrapper of an optimizer is seen through: units move with the state of what is inside."""

import pytest
import torch
from torch import nn

import zeroresize as zr
from zeroresize.resharding.parameter_state import require_movable_state

accelerate = pytest.importorskip("accelerate")


def train(group, wraps, config):
    """[9] losses, and how many units this rank has; with the wrapper, some are away in three of the steps."""
    torch.manual_seed(0)
    up, down = nn.Linear(8, 16, dtype=torch.float64), nn.Linear(16, 8, dtype=torch.float64)
    model = nn.Sequential(
        zr.ColumnParallelLinear.from_linear(up, process_group=group),
        nn.GELU(),
        zr.RowParallelLinear.from_linear(down, process_group=group),
    )
    zr.convert(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if wraps:
        optimizer = wrapped(optimizer)
    balancer = zr.Balancer(model, optimizer, process_group=group, config=config)
    x, losses, widths = torch.randn(4, 8, dtype=torch.float64), [], []
    for step in range(9):
        if wraps and step == 3:
            balancer.move((3, 1))
        if wraps and step == 6:
            balancer.move((1, 1))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
        losses.append(loss.item())
        widths.append(model[0].weight.shape[0])
    return losses, widths


def wrapped(optimizer):
    accelerate.Accelerator(cpu=True)
    return accelerate.optimizer.AcceleratedOptimizer(optimizer)


def test_units_move_with_the_state_of_the_optimizer_that_accelerate_wraps_and_layers_do_not(run_ranks):
    def check(rank, group):
        optimizer = wrapped(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
        with pytest.raises(ValueError, match=r"AcceleratedOptimizer only wraps a torch.optim.Optimizer: layers cannot"):
            require_movable_state(optimizer, {})
        config = zr.BalanceConfig(mode="exact", update_every=100)
        return train(group, True, config), train(group, False, config)

    for (losses, widths), (expected, _) in run_ranks(check, 2):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert widths[0] == widths[-1] == 8 != widths[4]
