"""Optimizers and parts that were replaced with which no unit may change hands: it is told, and training goes on."""

import logging
import math

import pytest
import torch
from helpers.processes import caught_log_lines, for_each
from helpers.virtual_training import FEATURES, Pair
from torch import nn

import zeroresize as zr
from zeroresize.resharding.agreement import CannotMoveError

pytestmark = pytest.mark.same_ranks

MATRICES = "is not element-wise"


def step(model, *optimizers):
    model(torch.ones(2, FEATURES)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


class ByNorm(torch.optim.SGD):
    """Scales by the norm of each matrix, as LAMB does; fails on a rank without units, as Muon does."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(
                        math.sqrt(parameter.shape[-1] / parameter.shape[0]) / (1.0 + parameter.grad.norm())
                    )
        super().step()


def balanced(group, optimizer_of, model=None, **config):
    model = zr.convert(model or Pair(group), process_group=group)
    optimizer = optimizer_of(model)
    config = zr.BalanceConfig(update_every=2, **config)
    return model, optimizer, zr.Balancer(model, optimizer, process_group=group, config=config)


def by_norm(model):
    return ByNorm(model.parameters(), lr=0.1)


# ---- optimizers for which dividing a matrix in another way is another training --------------------------------------


def test_no_unit_moves_with_an_optimizer_that_sees_matrices_and_training_goes_on(run_ranks):
    @for_each([("exact",), ("off",)])
    def train(rank, group, mode):
        with caught_log_lines(logging.WARNING) as lines:
            model, optimizer, balancer = balanced(group, by_norm, mode=mode)
        refusals = [line for line in lines if "no units change hands" in line and MATRICES in line]
        assert len(refusals) == (mode == "exact" and rank == 0)
        for number in range(6):
            step(model, optimizer)
            balancer.step()
            if number == 3:
                with pytest.raises(
                    ValueError, match=rf"^move\(\[1, 0\]\): no unit can change hands: the optimizer .*ByNorm {MATRICES}"
                ):
                    balancer.move([1, 0])
        assert balancer.plan.owned == (1.0, 1.0)
        with balancer.at_home():
            pass
        balancer.close()

    run_ranks(train, 2, timeout_s=30)


def test_where_ranks_judge_differently_none_moves_and_none_waits(run_ranks):
    def move(rank, group):
        if rank == 1:
            zr.mark_elementwise(ByNorm)
        *_, balancer = balanced(group, by_norm)
        with pytest.raises(ValueError, match="no unit can change hands: ") as error:
            balancer.move([3, 1])
        return str(error.value)

    of_first, of_second = run_ranks(move, 2, timeout_s=30)
    assert MATRICES in of_first and MATRICES in of_second and "(rank 0 of the group)" in of_second


# ---- what was replaced after the Balancer was made ------------------------------------------------------------------


class Training:
    def __init__(self, group):
        torch.manual_seed(0)
        self.group = group
        self.model, self.optimizer, self.balancer = balanced(
            group, lambda model: torch.optim.AdamW(model.parameters()), nn.Sequential(Pair(group), Pair(group))
        )

    def steps(self, number):
        """Trains on; returns the warnings that units stay."""
        with caught_log_lines() as lines:
            for _ in range(number):
                step(self.model, self.optimizer)
                self.balancer.step()
        return [line for line in lines if "from now on no units change hands, and training goes on" in line]


def replace_block(run):
    run.model[1] = Pair(run.group)
    return "layer 1.up was replaced in the model"


def replace_parameter(run):
    down = run.model[1].down
    down.weight = nn.Parameter(down.weight.detach().clone())
    run.optimizer.add_param_group({"params": [down.weight]})
    return "1.down.weight was replaced by another Parameter"


def replace_param_groups(run):
    group = run.optimizer.param_groups[0]
    group["params"] = [one for one in group["params"] if one is not run.model[0].down.weight]
    return "the optimizer no longer steps 0.down.weight"


def replace_optimizer(run):
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-3)
    return "weights changed, but not by the AdamW that the Balancer was given"


@pytest.mark.slow
def test_what_was_replaced_is_told_at_the_next_update_and_no_unit_moves(run_ranks):
    @for_each([(replace_block,), (replace_parameter,), (replace_param_groups,), (replace_optimizer,)])
    def train(rank, group, replace):
        run = Training(group)
        assert run.steps(3) == []
        why = replace(run)
        warnings = run.steps(3)  # with an update after the first and the third
        assert len(warnings) == (rank == 0) and all(why in line for line in warnings)
        with pytest.raises(CannotMoveError, match=why):
            run.balancer.move((3, 1))
        assert run.steps(6) == []
        assert run.balancer.plan.owned == (1.0, 1.0)
        run.balancer.close()

    run_ranks(train, 2, timeout_s=60)


def test_every_rank_learns_what_one_of_them_replaced(run_ranks):
    def train(rank, group):
        run = Training(group)
        run.steps(1)
        if rank == 1:
            replace_parameter(run)
        with pytest.raises(CannotMoveError, match=r"1\.down\.weight was replaced") as error:
            run.balancer.move((3, 1))
        assert "ranks [1] of the group failed" in str(error.value)

    run_ranks(train, 2, timeout_s=30)
