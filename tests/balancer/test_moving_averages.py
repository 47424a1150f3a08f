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
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segment import for_copies
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


class Heads(nn.Module):
    """Heads of four features, each of which is normalised by itself, and whose number it keeps."""

    def __init__(self, column, row, num_heads):
        super().__init__()
        self.column, self.row, self.num_heads = column, row, num_heads

    def forward(self, x):
        y = self.column(x).view(len(x), self.num_heads, -1)
        return self.row(torch.softmax(y, dim=-1).flatten(1))


def undivided_heads():
    column, _, row = whole_model()
    return nn.Sequential(Heads(column, row, WIDTH // 4))


def with_heads(group):
    column, _, row = plain(group)
    heads = Heads(column, row, WIDTH // 4 // group.size())

    def follow(units):
        heads.num_heads = len(units)

    segment = zr.Segment(["0.column"], "0.row", unit_size=4, on_change=follow, kind="heads")
    return zr.convert(nn.Sequential(heads), group, segments=[segment])


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))


class Training:
    """A model with its average, and the same undivided."""

    def __init__(self, model, group, whole=whole_model):
        self.model, self.whole = model, whole()
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


@on_ranks(2, cases=[(plain,), (of_dtensors,), (with_heads, undivided_heads)])
def test_an_average_follows_units_away_and_home(rank, group, make, whole=whole_model):
    training = Training(make(group), group, whole)
    training.steps(3)
    for shares in ((3, 1), (1, 5), None):
        training.balancer.move(shares)
        training.steps(3)
        training.compare()
    training.balancer.move((1, 5))
    training.steps(2)
    with training.balancer.at_home():
        shapes = [tuple(local_of(value).shape) for value in training.average.state_dict().values()]
        assert (WIDTH // 2, SIZE) in shapes and (SIZE, WIDTH // 2) in shapes
        training.compare()
    with pytest.raises(RuntimeError, match="copy of an unevenly divided layer"):
        training.average.state_dict()
    training.steps(2)
    training.compare()


@on_ranks(2)
def test_what_only_some_ranks_hold_and_what_was_trained_stay_and_the_model_moves(rank, group):
    training = Training(plain(group), group)
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
    segment = zr.Segment(["0"], "2", unit_size=4, on_change=[].append)
    training = Training(zr.convert(plain(group), group, segments=[segment]), group)
    training.steps(1)
    with pytest.raises((CannotMoveError, RuntimeError), match=r"a copy \d of 0\.weight, as of a moving average"):
        training.balancer.move((3, 1))
    training.steps(2)
    training.compare()
    del training.average
    training.average = training.whole_average  # which the model's weights would not fit
    training.balancer.move((3, 1))
    assert training.model[0].weight.shape[0] == (20, 4)[rank]


OF_ALL = nn.Module()


def test_on_change_of_a_copy_is_known_where_it_holds_modules_and_constants_alone():
    module, copied, stranger, kept, size = nn.Module(), nn.Module(), nn.Module(), [], 3

    def follow(units):
        module.num_heads, module.size = len(units), size * len(units)

    for_copies(follow, {id(module): copied})([4, 5])
    assert vars(copied)["num_heads"] == 2 and vars(copied)["size"] == 6 and not hasattr(module, "num_heads")
    for unknown in (
        kept.append,
        lambda units: kept.append(units),
        lambda units: follow(units),
        lambda units: setattr(stranger, "num_heads", len(units)),
        lambda units: setattr(OF_ALL, "num_heads", len(units)),
        lambda units, held=module: setattr(held, "num_heads", len(units)),
        lambda units: (lambda: setattr(module, "num_heads", len(units)))(),
        lambda units: setattr(module, "num_heads", later),
    ):
        assert for_copies(unknown, {id(module): copied}) is None
    assert for_copies(None, {}) is None
    later = 4
