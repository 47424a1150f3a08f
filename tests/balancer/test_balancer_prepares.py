"""What a balancer does to a model before the first step: it converts, finds its group, keys dropout, divides units."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.processes import caught_log_lines, for_each
from helpers.virtual_training import FEATURES
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import owned_segments
from zeroresize.layers.unit_dropout import UnitDropout
from zeroresize.pipeline import Pipeline

pytestmark = pytest.mark.same_ranks

HIDDEN = 4 * FEATURES


def split_pair(group, p=None):
    """Column-parallel, dropout with probability ``p`` (None for none at all), row-parallel."""
    torch.manual_seed(0)
    layers = [
        zr.ColumnParallelLinear.from_linear(nn.Linear(FEATURES, HIDDEN), process_group=group),
        nn.GELU(),
        zr.RowParallelLinear.from_linear(nn.Linear(HIDDEN, FEATURES), process_group=group),
    ]
    return nn.Sequential(*layers[:2], *([] if p is None else [nn.Dropout(p)]), layers[2])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def owned(model):
    return [segment.owned.counts for segment in owned_segments(balanced_layers(model))]


def train(model, optimizer, balancer, num_steps):
    x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(num_steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
        losses.append(loss.item())
    return losses


# ---- the group ------------------------------------------------------------------------------------------------------


def test_a_mesh_of_one_dimension_is_taken_for_its_group(run_ranks):
    def check(rank, group):
        grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        tp = grid["tp"]
        up = zr.ColumnParallelLinear(FEATURES, HIDDEN, process_group=tp)
        down = zr.RowParallelLinear.from_linear(nn.Linear(HIDDEN, FEATURES), process_group=tp)
        assert isinstance(up.process_group, dist.ProcessGroup)
        model = zr.convert(nn.Sequential(up, down), tp)
        zr.Balancer(model, sgd(model), process_group=tp).close()
        with pytest.raises(ValueError, match=r"has 2 dimensions: pass the one of the tensor-parallel group, such as "):
            zr.convert(model, grid)
        with pytest.raises(ValueError, match="has 2 dimensions"):
            zr.ColumnParallelLinear(FEATURES, HIDDEN, process_group=grid)
        with zr.StragglerInjector(model, process_group=tp, chi={1: 1.5}):
            model(torch.ones(2, FEATURES))
        pipeline = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], F.mse_loss, num_microbatches=2, process_group=tp)
        assert pipeline.process_group is tp.get_group() and pipeline.num_stages == 2
        with pytest.raises(ValueError, match="has 2 dimensions"):
            zr.Balancer(model, sgd(model), process_group=tp, data_parallel_group=grid)

    run_ranks(check, 2)


def test_in_a_group_of_one_nothing_is_done_and_a_line_says_so(run_ranks):
    def check(rank, group):
        model = split_pair(group, p=0.5)
        with caught_log_lines() as lines:
            balancer = zr.Balancer(model, sgd(model))
        assert len(lines) == 1 and "one rank, so there is nothing to balance" in lines[0]
        assert balanced_layers(model) == {} and type(model[2]) is nn.Dropout
        train(model, sgd(model), balancer, 3)
        balancer.close()

    run_ranks(check, 1)


# ---- dropout --------------------------------------------------------------------------------------------------------


def test_dropout_is_keyed_by_the_balancer_and_put_back_when_it_closes(run_ranks):
    def check(rank, group):
        model = split_pair(group, p=0.5)
        dropout = model[2]
        zr.convert(model)
        assert model[2] is dropout, "convert knows no mode and no seed"
        balancer = zr.Balancer(model, sgd(model))
        assert isinstance(model[2], UnitDropout) and model[2].p == 0.5
        model.eval()
        balancer.close()
        assert model[2] is dropout and not dropout.training
        assert list(model.state_dict()) == ["0.weight", "0.bias", "3.weight", "3.bias"]

    run_ranks(check, 2)


# ---- shares ---------------------------------------------------------------------------------------------------------


def test_the_shares_of_the_configuration_are_in_force_before_the_first_step_and_once(run_ranks):
    config = zr.BalanceConfig(shares=(3, 1), moves=False)

    @for_each([(None,), (0.5,)])
    def check(rank, group, p):
        model = zr.convert(split_pair(group, p))
        assert owned(model) == [(96, 96)]
        balancer = zr.Balancer(model, sgd(model), config)
        assert owned(model) == [(144, 48)] and len(model[0].weight) == (144, 48)[rank]
        assert balancer.plan.owned == pytest.approx((1.5, 0.5))
        balancer.close()
        assert owned(model) == [(144, 48)], "close() is no collective call: it brings no units home"
        balancer = zr.Balancer(model, sgd(model))
        balancer.move((1, 1))
        balancer.close()
        zr.Balancer(model, sgd(model), config).close()
        assert owned(model) == [(96, 96)], "only at first"

    run_ranks(check, 2)


def test_shares_that_differ_or_do_not_fit_are_an_error_before_anything_is_changed(run_ranks):
    def check(rank, group):
        model = split_pair(group)
        with pytest.raises(ValueError, match=r"wanted are .*or 2 numbers, one for each rank"):
            zr.Balancer(model, sgd(model), zr.BalanceConfig(shares=(2, 1, 1)))
        assert balanced_layers(model) == {}
        config = zr.BalanceConfig(shares=[(3, 1), "even"][rank], moves=False)
        with pytest.raises(ValueError, match="shares"):
            zr.Balancer(model, sgd(model), config)
        assert owned(model) == [(96, 96)]
        zr.Balancer(model, sgd(model), zr.BalanceConfig(shares=(3, 1), moves=False))
        assert owned(model) == [(144, 48)]

    run_ranks(check, 2, timeout_s=30)
