"""Optimizers for which dividing a matrix in another way is another training: no unit moves, and training goes on."""

import logging
import math

import pytest
import torch
from helpers.processes import caught_log_lines
from helpers.virtual_training import FEATURES, Pair
from torch import nn

import zeroresize as zr

MATRICES = "is not element-wise"


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


def made(group, kind=ByNorm, shares=None, **config):
    model = Pair(group)
    config = zr.BalanceConfig(update_every=2, **config)
    zr.convert(model, process_group=group, shares=shares)
    return model, zr.Balancer(model, kind(model.parameters(), lr=0.1), process_group=group, config=config)


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_no_unit_moves_and_training_goes_on(run_ranks, mode):
    def train(rank, group):
        with caught_log_lines(logging.WARNING) as lines:
            model, balancer = made(group, mode=mode)
        refusals = [line for line in lines if "no units change hands" in line and MATRICES in line]
        assert len(refusals) == (mode == "exact" and rank == 0)
        optimizer = ByNorm(model.parameters(), lr=0.1)
        for step in range(6):
            model(torch.ones(2, FEATURES)).square().mean().backward()
            optimizer.step()
            balancer.step()
            if step == 3:
                with pytest.raises(
                    ValueError, match=rf"^move\(\[1, 0\]\): no unit can change hands: the optimizer .*ByNorm {MATRICES}"
                ):
                    balancer.move([1, 0])
        assert balancer.plan.owned == (1.0, 1.0)
        with balancer.at_home():
            pass

    run_ranks(train, 2, timeout_s=30)


def test_torchs_muon_and_adafactor_are_refused(run_ranks):
    def train(rank, group):
        for kind in (getattr(torch.optim, name, None) for name in ("Muon", "Adafactor")):
            if kind is None:
                continue
            model = nn.Sequential(Pair(group))
            for layer in (model[0].up, model[0].down):
                layer.bias = None
            config = zr.BalanceConfig()
            zr.convert(model, process_group=group)
            balancer = zr.Balancer(model, kind(model.parameters()), process_group=group, config=config)
            with pytest.raises(ValueError, match=f"{kind.__name__} {MATRICES}"):
                balancer.move([3, 1])
            balancer.close()

    run_ranks(train, 2, timeout_s=30)


def test_where_ranks_judge_differently_none_moves_and_none_waits(run_ranks):
    def move(rank, group):
        if rank == 1:
            zr.mark_elementwise(ByNorm)
        _, balancer = made(group)
        with pytest.raises(ValueError, match="no unit can change hands: ") as error:
            balancer.move([3, 1])
        return str(error.value)

    of_first, of_second = run_ranks(move, 2, timeout_s=30)
    assert MATRICES in of_first and MATRICES in of_second and "(rank 0 of the group)" in of_second
