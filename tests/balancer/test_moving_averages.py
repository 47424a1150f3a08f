"""Moving averages of a model's weights follow its units, or units stay where they could not."""

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeroresize as zr
from zeroresize.layers.linear import ColumnParallelLinear, RowParallelLinear
from zeroresize.resharding.agreement import CannotMoveError

SIZE, WIDTH = 6, 24


def whole_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, SIZE)).double()


def plain(group):
    column, _, row = whole_model()
    made = ColumnParallelLinear.from_linear(column, process_group=group)
    return nn.Sequential(made, nn.Tanh(), RowParallelLinear.from_linear(row, process_group=group))


def of_dtensors(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    return parallelize_module(whole_model(), mesh, {"0": zr.ColwiseParallel(), "2": zr.RowwiseParallel()})


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))


class Training:
    """A model with its average, and the same undivided."""

    def __init__(self, model, segments=(), group=None):
        if segments:
            zr.convert(model, group, segments=segments)
        self.model, self.whole = model, whole_model()
        self.optimizer, self.of_whole = (torch.optim.AdamW(each.parameters(), 0.01) for each in (model, self.whole))
        self.balancer = zr.Balancer(model, self.optimizer, zr.BalanceConfig(update_every=100), process_group=group)
        self.average, self.whole_average = averaged(model), averaged(self.whole)
        self.num_steps = 0

    def steps(self, num_steps):
        for _ in range(num_steps):
            x = self.batch()
            for model, optimizer, average in (
                (self.whole, self.of_whole, self.whole_average),
                (self.model, self.optimizer, self.average),
            ):
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
            self.balancer.step()
            self.num_steps += 1

    def batch(self):
        return torch.randn(5, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(self.num_steps))

    def compare(self):
        """The average computes what that of the undivided model does."""
        x = self.batch()
        with torch.no_grad():
            for mine, wanted in ((self.average, self.whole_average), (self.model, self.whole)):
                torch.testing.assert_close(mine(x), wanted(x), rtol=1e-10, atol=1e-10)


@on_ranks(2, cases=[(plain,), (of_dtensors,)])
def test_an_average_follows_units_away_and_home(rank, group, make):
    training = Training(make(group), group=group)
    training.steps(3)
    for shares in ((3, 1), (0, 1), None):
        training.balancer.move(shares)
        training.steps(3)
        training.compare()
    training.balancer.move((1, 5))
    training.steps(2)
    with training.balancer.at_home():
        state = {name: value for name, value in training.average.state_dict().items() if name.startswith("module.2")}
        assert tuple(state["module.2.weight"].shape) in {(SIZE, WIDTH // 2), (SIZE, WIDTH)}
        training.compare()
    with pytest.raises(RuntimeError, match="copy of an unevenly divided layer"):
        training.average.state_dict()
    training.steps(2)
    training.compare()


@on_ranks(2)
def test_what_only_some_ranks_hold_and_what_was_trained_stay_and_the_model_moves(rank, group):
    training = Training(plain(group), group=group)
    trained, here = copy.deepcopy(training.model), copy.deepcopy(training.model)
    optimizer = torch.optim.AdamW(trained.parameters(), 0.01)
    trained(training.batch()).sum().backward()
    optimizer.step()
    if rank:
        del here
    before = [parameter.detach().clone() for parameter in trained.parameters()]
    training.steps(1)
    training.balancer.move((3, 1))
    training.steps(2)
    training.compare()
    for parameter, was in zip(trained.parameters(), before, strict=True):
        assert torch.equal(parameter, was)
    assert rank or here[0].weight.shape == (WIDTH // 2, SIZE)


@on_ranks(2)
def test_units_whose_module_a_copy_cannot_follow_stay_by_name(rank, group):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    heads = []
    training = Training(plain(group), [zr.Segment(["0"], "2", unit_size=4, on_change=heads.append)], group)
    training.steps(1)
    with pytest.raises((CannotMoveError, RuntimeError), match=r"a copy \d of 0\.weight, as of a moving average"):
        training.balancer.move((3, 1))
    training.steps(2)
    training.compare()
    del training.average
    training.average = training.whole_average  # which the model's weights would not fit
    training.balancer.move((3, 1))
    assert training.model[0].weight.shape[0] == (20, 4)[rank]
