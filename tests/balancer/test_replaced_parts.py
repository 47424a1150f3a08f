"""Layers, parameters and optimizers that are replaced after the Balancer was made: units stay, training goes on."""

import copy

import pytest
import torch
from helpers.processes import caught_log_lines
from helpers.virtual_training import FEATURES, Pair
from torch import nn

import zeroresize as zr
from zeroresize.resharding.agreement import CannotMoveError


class Model(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.blocks = nn.ModuleList([Pair(group), Pair(group)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Training:
    def __init__(self, group, **config):
        torch.manual_seed(0)
        self.group, self.model = group, Model(group)
        self.config = zr.BalanceConfig(update_every=2, **config)
        zr.convert(self.model, process_group=group)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.balancer = self.balance()

    def balance(self):
        return zr.Balancer(self.model, self.optimizer, process_group=self.group, config=self.config)

    def steps(self, number):
        """Trains on; returns the warnings that units stay."""
        with caught_log_lines() as lines:
            for _ in range(number):
                self.model(torch.ones(2, FEATURES)).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.balancer.step()
        return [line for line in lines if "from now on no units change hands, and training goes on" in line]


def replace_block(run, group):
    run.model.blocks[1] = Pair(group)
    return "layer blocks.1.up was replaced in the model"


def replace_layer(run, group):
    up = run.model.blocks[0].up
    run.model.blocks[0].up = copy.deepcopy(up)
    return "layer blocks.0.up was replaced in the model"


def replace_parameter(run, group):
    down = run.model.blocks[1].down
    down.weight = nn.Parameter(down.weight.detach().clone())
    run.optimizer.add_param_group({"params": [down.weight]})
    return "blocks.1.down.weight was replaced by another Parameter"


def without(optimizer, parameter):
    group = optimizer.param_groups[0]
    group["params"] = [one for one in group["params"] if one is not parameter]


def replace_param_groups(run, group):
    without(run.optimizer, run.model.blocks[0].down.weight)
    return "the optimizer no longer steps blocks.0.down.weight"


def replace_optimizer(run, group):
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-3)
    return "weights changed, but not by the AdamW that the Balancer was given"


@pytest.mark.parametrize(
    "replace",
    [
        replace_block,
        replace_optimizer,
        *(
            pytest.param(replace, marks=pytest.mark.slow)
            for replace in (replace_layer, replace_parameter, replace_param_groups)
        ),
    ],
)
def test_what_was_replaced_is_told_at_the_next_update_and_no_unit_moves(run_ranks, replace):
    def train(rank, group):
        run = Training(group)
        assert run.steps(3) == []
        why = replace(run, group)
        warnings = run.steps(3)  # with an update after the first and the third
        assert len(warnings) == (rank == 0) and all(why in line for line in warnings)
        with pytest.raises(CannotMoveError, match=why):
            run.balancer.move((3, 1))
        assert run.steps(6) == []
        assert run.balancer.plan.owned == (1.0, 1.0)

    run_ranks(train, 2, timeout_s=30)


def test_every_rank_learns_what_one_of_them_replaced(run_ranks):
    def train(rank, group):
        run = Training(group)
        run.steps(1)
        if rank == 1:
            replace_parameter(run, group)
        with pytest.raises(CannotMoveError, match=r"blocks\.1\.down\.weight was replaced") as error:
            run.balancer.move((3, 1))
        assert ("rank 1 of the group" in str(error.value)) == (rank == 0)

    run_ranks(train, 2, timeout_s=30)
