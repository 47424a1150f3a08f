"""Units move only with all that optimizers keep of them: what another optimizer steps, or steps before, is told."""

import logging

import pytest
import torch
from helpers.processes import caught_log_lines
from helpers.virtual_training import FEATURES, Pair

import zeroresize as zr


def step(model, *optimizers):
    model(torch.ones(2, FEATURES)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("checks", [True, False])
def test_what_another_optimizer_steps_stays_where_it_is(run_ranks, checks):
    def train(rank, group):
        model = Pair(group)
        weights = [one for one in model.parameters() if one.ndim == 2]
        biases = [one for one in model.parameters() if one.ndim == 1]
        given = [weights, weights[:1]][not checks]
        by = torch.optim.SGD(given, lr=0.1, momentum=0.9)
        other = torch.optim.AdamW([one for one in model.parameters() if all(one is not its for its in given)])
        assert biases
        config = zr.BalanceConfig(update_every=2, start_checks=checks)
        zr.convert(model, process_group=group)
        with caught_log_lines(logging.INFO) as lines:
            balancer = zr.Balancer(model, by, process_group=group, config=config)
        assert any("the optimizer does not step" in line for line in lines)
        for _ in range(2):
            step(model, by, other)
            balancer.step()
        with pytest.raises(ValueError, match=r"not step .*up\.bias"):
            balancer.move((3, 1))
        step(model, by, other)

    run_ranks(train, 2, timeout_s=30)


def test_frozen_parameters_hold_up_no_unit(run_ranks):
    def train(rank, group):
        model = Pair(group)
        model.up.bias.requires_grad_(False)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
        config = zr.BalanceConfig(update_every=2)
        zr.convert(model, process_group=group)
        balancer = zr.Balancer(model, optimizer, process_group=group, config=config)
        balancer.move((3, 1))
        assert balancer.plan.owned == (1.5, 0.5)
        step(model, optimizer)

    run_ranks(train, 2, timeout_s=30)
