"""Weights that layers share, before and after the layers are split."""

import copy
import logging

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroresize as zr

WIDTH, HIDDEN = 4, 8


class Tied(nn.Module):
    """Two blocks with one ``up``, one ``down`` and one bias each, in modules of their own."""

    def __init__(self, words=False):
        super().__init__()
        self.embed = nn.Embedding(HIDDEN, WIDTH)
        self.up1, self.down1 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.up2, self.down2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        if words:
            self.up2.weight = self.embed.weight
        else:
            for first, other in ((self.up1, self.up2), (self.down1, self.down2)):
                other.weight, other.bias = first.weight, first.bias

    def forward(self, x):
        x = self.embed(x)
        x = x + self.down1(torch.tanh(self.up1(x)))
        return x + self.down2(torch.tanh(self.up2(x)))


def model_of(words=False):
    torch.manual_seed(0)
    return Tied(words).double()


def trained(model, balance=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    balancer = zr.Balancer(model, optimizer) if balance else None
    losses = []
    for _ in range(4):
        loss = model(torch.arange(6)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if balancer is not None:
            balancer.step()
    return losses


PLAN = {"up1": "column", "up2": "column", "down1": "row", "down2": "row"}


def split(model, group, how):
    if how == "from_linear":
        kinds = {"column": zr.ColumnParallelLinear, "row": zr.RowParallelLinear}
        for name, kind in PLAN.items():
            setattr(model, name, kinds[kind].from_linear(getattr(model, name), process_group=group))
        return model
    styles = {"zr": (zr.ColwiseParallel, zr.RowwiseParallel), "torch": (ColwiseParallel, RowwiseParallel)}[how]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
    return parallelize_module(model, mesh, {n: styles[kind == "row"]() for n, kind in PLAN.items()})


def test_layers_that_are_split_alike_stay_tied(run_ranks):
    def train(rank, group):
        whole = model_of()
        runs = [(how, balance) for how in ("zr", "from_linear") for balance in (False, True)]
        return [trained(split(copy.deepcopy(whole), group, *run[:1]), run[1]) for run in runs] + [
            # two models made of one whole one share nothing
            split(whole_copy := model_of(), group, "zr").up1.weight is not split(model_of(), group, "zr").up1.weight,
            len(list(whole_copy.parameters())),
        ]

    expected = trained(model_of())
    for *runs, are_apart, num_parameters in run_ranks(train, 2):
        assert all(losses == pytest.approx(expected, rel=1e-10) for losses in runs)
        assert are_apart and num_parameters == 5


@on_ranks(2)
def test_layers_that_are_split_otherwise_are_refused(rank, group):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
    square = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
    square["b"].weight = square["a"].weight
    with pytest.raises(ValueError, match="are one parameter"):
        parallelize_module(square, mesh, {"a": zr.ColwiseParallel(), "b": zr.RowwiseParallel()})
    assert square["b"].weight.shape == (WIDTH, WIDTH) and type(square["b"]) is nn.Linear
    twice = nn.ModuleDict({"a": (linear := nn.Linear(WIDTH, HIDDEN)), "b": linear})
    for name in twice:
        twice[name] = zr.ColumnParallelLinear.from_linear(linear, process_group=group)
    models = [*(split(model_of(words=True), group, how) for how in ("zr", "from_linear")), twice]
    for model, names in zip(models, ("embed.weight and up2.weight",) * 2 + ("a.weight and b.weight",), strict=True):
        with pytest.raises(ValueError, match=f"{names} were one parameter"):
            zr.convert(model)


@on_ranks(2)
def test_weights_that_torch_has_untied_are_named_once(rank, group, *, caplog):
    lines = []
    for model in (model_of(), model_of(words=True), nn.ModuleDict({"up1": nn.Linear(WIDTH, HIDDEN)})):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            if isinstance(model, Tied):
                zr.convert(split(model, group, "torch"))
        lines.append([line for line in caplog.messages if "untied" in line])
    (both, words, none), others = gathered(group, lines)
    assert len(both) == len(words) == 1 and not none and not any(others)
    assert "up1.weight and up2.weight" in both[0] and "embed.weight and up2.weight" in words[0]


@on_ranks(2)
def test_a_frozen_model_made_of_the_same_whole_layers_is_no_tie(rank, group):
    up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    towers = {}
    for name in ("policy", "frozen"):
        first = zr.ColumnParallelLinear.from_linear(up, process_group=group)
        towers[name] = nn.Sequential(first, zr.RowParallelLinear.from_linear(down, process_group=group))
    towers["frozen"].requires_grad_(False)
    zr.convert(nn.ModuleDict(towers))
