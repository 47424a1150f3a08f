"""A checkpoint of torch.distributed.checkpoint: saved under one division of the units, loaded under any other one."""

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import (
    HEAD_SIZE,
    HEADS,
    NEURONS,
    WIDTH,
    block,
    everything_of,
    home,
    same,
    segments_of,
    uneven,
)
from torch import nn

import zeroresize as zr
from zeroresize.pipeline import Pipeline
from zeroresize.resharding.units.moving_units import move_units

pytestmark = [pytest.mark.slow, pytest.mark.versions]

#: Divisions by which the last rank holds nothing; the first rank little; random units are where; all are at home.
NOTHING, LITTLE, AT_HOME = 1, 0, None


class Training:
    """A block of layers on one rank, its units divided in some way."""

    def __init__(self, group, division=AT_HOME, seed=0, lr=1e-2, make_optimizer=torch.optim.AdamW):
        self.group, self.model = group, block(group, seed)
        self.segments = segments_of(self.model, group)
        for segment in self.segments:
            for where in segment.tensors:
                where.owner.segment = segment
        self.optimizer = make_optimizer(self.model.parameters(), lr=lr)
        self.num_steps = 0
        self.divide(division)

    def divide(self, division):
        ranks = dist.get_world_size(self.group)
        targets = home(ranks) if division is AT_HOME or ranks == 1 else uneven(ranks, division)
        move_units(self.segments, targets, process_group=self.group, optimizer=self.optimizer)

    def train(self, num_steps, begin=None):
        return train(self.model, self.optimizer, range(num_steps) if begin is None else range(begin, begin + num_steps))

    def everything(self):
        """Weights and optimizer state of the whole model, bit for bit."""
        self.optimizer.zero_grad()
        tensors = everything_of(self.segments, self.optimizer, self.group)
        for name in ("0.out.bias", "1.down.bias", "2.weight", "2.bias"):
            parameter = self.model.get_parameter(name)
            tensors[name] = parameter.detach().clone()
            tensors |= {f"{name} {key}": value for key, value in self.optimizer.state.get(parameter, {}).items()}
        return copy.deepcopy(tensors)

    def state(self):
        return zr.sharded_state_dict(self.model, self.optimizer)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole_block(group):
    """The same of plain layers, on one rank."""
    attention, feed_forward, _ = model = block(group)
    for name in "qkv":
        setattr(attention, name, nn.Linear(WIDTH, HEADS * HEAD_SIZE, bias=name != "k", dtype=torch.float64))
    attention.out = nn.Linear(HEADS * HEAD_SIZE, WIDTH, dtype=torch.float64)
    feed_forward.up = nn.Linear(WIDTH, NEURONS, dtype=torch.float64)
    feed_forward.down = nn.Linear(NEURONS, WIDTH, dtype=torch.float64)
    return model


def saved(run_ranks, folder, division):
    """Saves in the middle of a training; returns everything that is to be loaded, and the next three losses."""

    def save(rank, group):
        training = Training(group)
        training.train(2)
        training.divide(division)
        training.train(2, begin=2)
        everything = training.everything()
        dcp.save(training.state(), checkpoint_id=folder)
        assert same(training.everything(), everything)
        return everything, training.train(3, begin=4)

    return run_ranks(save, 2)[0]


@pytest.mark.parametrize(
    ("division", "num_ranks", "other_division"),
    [
        (LITTLE, 2, NOTHING),
        (LITTLE, 1, AT_HOME),
        (2, 4, 3),
    ],
)
def test_any_division_is_loaded_into_any_other(run_ranks, tmp_path, division, num_ranks, other_division):
    folder = str(tmp_path / "checkpoint")
    everything, losses = saved(run_ranks, folder, division)

    def load(rank, group):
        training = Training(group, other_division, seed=1, lr=0.5)
        held = [segment.owned.counts for segment in training.segments]
        dcp.load(training.state(), checkpoint_id=folder)
        assert [segment.owned.counts for segment in training.segments] == held
        assert all(parameter.grad is None for parameter in training.model.parameters())
        return training.everything(), training.train(3, begin=4)

    for loaded, next_losses in run_ranks(load, num_ranks):
        assert same(loaded, everything)
        assert next_losses == pytest.approx(losses, abs=1e-10, rel=0)


def test_a_file_holds_what_the_model_that_is_not_divided_has_and_the_other_way_round(run_ranks, tmp_path):
    folder, whole = str(tmp_path / "checkpoint"), str(tmp_path / "whole")
    everything, losses = saved(run_ranks, folder, NOTHING)

    def load(rank, group):
        model = whole_block(group)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
        again = whole_block(group)
        optimizer = torch.optim.AdamW(again.parameters())
        dcp.load(zr.sharded_state_dict(again, optimizer), checkpoint_id=folder)
        assert same(dict(again.named_parameters()), dict(model.named_parameters()))
        moments = {name: optimizer.state[one]["exp_avg"] for name, one in again.named_parameters()}
        weights = {name: one.detach().clone() for name, one in again.named_parameters()}
        moments = copy.deepcopy(moments)
        dcp.save(zr.sharded_state_dict(again, optimizer), checkpoint_id=whole)
        return weights, moments, train(again, optimizer, range(4, 7))

    def divide(rank, group):
        training = Training(group, NOTHING, seed=1)
        dcp.load(training.state(), checkpoint_id=whole)
        return training.train(3, begin=4)

    ((weights, moments, next_losses),) = run_ranks(load, 1)
    for of_rank in (next_losses, *run_ranks(divide, 3)):
        assert of_rank == pytest.approx(losses, abs=1e-10, rel=0)
    for name, weight in weights.items():
        assert torch.equal(weight, everything[name].reshape(weight.shape)), name
        assert torch.equal(moments[name], everything[f"{name} exp_avg"].reshape(weight.shape)), name


def lion_like(parameters, lr):
    class SignMomentum(torch.optim.Optimizer):
        """One moment, and a number of steps that is no tensor; it steps over empty tensors."""

        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and parameter.numel():
                        state = self.state[parameter]
                        state["step"] = state.get("step", 0) + 1
                        state.setdefault("moment", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                        parameter.sub_(state["moment"].sign(), alpha=group["lr"] / state["step"])

    return SignMomentum(parameters, lr)


OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "momentum": lambda *a, **k: torch.optim.SGD(*a, **k, momentum=0.9, dampening=0.5),
    "Adam fused": lambda *a, **k: torch.optim.Adam(*a, **k, fused=True, amsgrad=True),
    "AdamW, lr a tensor": lambda one, lr: torch.optim.AdamW(one, lr=torch.tensor(lr), foreach=False),
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "with a number that is no tensor": lion_like,
}


@on_ranks(2, timeout_s=120)
def test_a_new_optimizer_goes_on_as_the_old_one(rank, group, *, tmp_path):
    for name, make_optimizer in OPTIMIZERS.items():
        training = Training(group, make_optimizer=make_optimizer)
        training.train(2)
        training.divide(NOTHING)
        training.train(2, begin=2)
        dcp.save(training.state(), checkpoint_id=str(tmp_path / name))
        other = Training(group, LITTLE, seed=1, lr=0.5, make_optimizer=make_optimizer)
        (settings,) = other.optimizer.param_groups
        kind = type(settings["lr"])
        dcp.load(other.state(), checkpoint_id=str(tmp_path / name))
        assert type(settings["lr"]) is kind and float(settings["lr"]) == pytest.approx(1e-2), name
        assert same(other.everything(), training.everything()), name
        assert other.train(3, begin=4) == pytest.approx(training.train(3, begin=4), abs=1e-10, rel=0), name


@on_ranks(2)
def test_state_that_some_parameters_or_ranks_lack(rank, group, *, tmp_path):
    def through_a_file(training, other, name):
        dcp.save(training.state(), checkpoint_id=str(tmp_path / name))
        dcp.load(other.state(), checkpoint_id=str(tmp_path / name))

    new, stepped = Training(group, NOTHING), Training(group, LITTLE, seed=1)
    stepped.train(2)
    through_a_file(new, stepped, "before the first step")
    assert not new.optimizer.state and not any(stepped.optimizer.state.values())
    assert same(stepped.everything(), new.everything())
    assert stepped.train(3) == pytest.approx(new.train(3), abs=1e-10, rel=0)

    frozen, other = Training(group, NOTHING), Training(group, LITTLE, seed=1)
    frozen.model[2].bias.requires_grad_(False)
    frozen.train(2)
    other.train(1)
    through_a_file(frozen, other, "a parameter that never had a gradient")
    assert not other.optimizer.state.get(other.model[2].bias)
    assert other.optimizer.state[other.model[2].weight]["step"] == 2

    # A rank without units made no state: that of the others counts.
    uneven = Training(group, NOTHING, make_optimizer=lion_like)
    uneven.train(2)
    assert bool(uneven.optimizer.state.get(uneven.model[1].up.weight)) == (rank == 0)
    other = Training(group, LITTLE, seed=1, make_optimizer=lion_like)
    through_a_file(uneven, other, "a rank without units")
    assert other.optimizer.state[other.model[1].up.weight]["step"] == 2
    assert other.train(3, begin=2) == pytest.approx(uneven.train(3, begin=2), abs=1e-10, rel=0)


@on_ranks(2)
def test_another_format_or_other_parameter_groups_are_an_error(rank, group, *, tmp_path, monkeypatch):
    saved, other = Training(group), Training(group, seed=1)
    dcp.save(saved.state(), checkpoint_id=str(tmp_path / "groups"))
    before = other.everything()
    monkeypatch.setattr("zeroresize.checkpoints.optimizer_state.FORMAT", 7)
    dcp.save(saved.state(), checkpoint_id=str(tmp_path / "format"))
    monkeypatch.undo()
    with pytest.raises(dcp.CheckpointException, match=r"format: 1 is needed, found 7"):
        dcp.load(other.state(), storage_reader=zr.CheckpointReader(str(tmp_path / "format")))
    assert same(other.everything(), before)
    first, *others = other.model.parameters()
    other.optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others}])
    with pytest.raises(ValueError, match="has 1 parameter groups, and this one has 2"):
        dcp.load(other.state(), checkpoint_id=str(tmp_path / "groups"))


@on_ranks(2)
def test_units_may_move_between_the_call_and_the_saving_or_while_it_goes_on(rank, group, *, tmp_path):
    training, other = Training(group), Training(group, seed=1)
    training.train(2)
    state, others = training.state(), other.state()
    training.divide(NOTHING)
    other.divide(LITTLE)
    dcp.save(state, checkpoint_id=str(tmp_path / "moved"))
    dcp.load(others, checkpoint_id=str(tmp_path / "moved"))
    everything = training.everything()
    assert same(other.everything(), everything)
    saving = dcp.async_save(
        training.state(), checkpoint_id=str(tmp_path / "asynchronous"), process_group=dist.new_group()
    )
    training.divide(AT_HOME)
    training.train(2, begin=2)
    saving.result()
    dcp.load(other.state(), checkpoint_id=str(tmp_path / "asynchronous"))
    assert same(other.everything(), everything)


def test_what_convert_has_divided_and_a_balancer_are_saved_together(run_ranks, tmp_path):
    folder = str(tmp_path / "checkpoint")
    config = zr.BalanceConfig(mode="exact")

    def converted(group, shares, seed):
        training = Training(group, seed=seed)
        for module in training.model.modules():
            module.segment = None
        attention = training.model[0]
        heads = zr.Segment(
            ["0.q", "0.k", "0.v"],
            "0.out",
            unit_size=HEAD_SIZE,
            on_change=lambda units: setattr(attention, "num_heads", len(units)),
        )
        zr.convert(training.model, process_group=group, segments=[heads], shares=shares)
        balancer = zr.Balancer(training.model, training.optimizer, process_group=group, config=config)
        return training, balancer

    def save(rank, group):
        training, balancer = converted(group, (2, 1), 0)
        training.train(2)
        counts = [layer.segment.owned.counts for layer in (training.model[0].out, training.model[1].down)]
        assert counts == [(8, 4), (16, 8)]
        dcp.save({**training.state(), "balancer": balancer}, checkpoint_id=folder)
        with balancer.at_home():
            weights = {name: one.clone() for name, one in training.model.state_dict().items()}
        return training.train(3, begin=2), weights

    def load(rank, group):
        training, balancer = converted(group, (1, 3), 1)
        dcp.load({**training.state(), "balancer": balancer}, checkpoint_id=folder)
        with balancer.at_home():
            weights = {name: one.clone() for name, one in training.model.state_dict().items()}
        return training.train(3, begin=2), weights

    for (losses, weights), (next_losses, next_weights) in zip(run_ranks(save, 2), run_ranks(load, 2), strict=True):
        assert next_losses == pytest.approx(losses, abs=1e-10, rel=0)
        assert same(next_weights, weights)


def test_a_rank_that_saves_alone_hears_who_did_not_come(run_ranks, monkeypatch):
    monkeypatch.setattr("zeroresize.comm.rendezvous.time_limit", lambda group: timedelta(seconds=0.3))

    def save_alone(rank, group):
        layers = [zr.ColumnParallelLinear(4, 8, process_group=group), zr.RowParallelLinear(8, 4, process_group=group)]
        pipeline = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], torch.sub, num_microbatches=2, process_group=group)
        models = nn.Sequential(*layers), pipeline
        if rank == 0:
            for model in models:
                with pytest.raises(RuntimeError, match=r"ranks \[1\] of the group did not come to call sharded_state"):
                    zr.sharded_state_dict(model)
        dist.barrier()
        return [len(zr.sharded_state_dict(model)) for model in models]  # it goes on

    assert run_ranks(save_alone, 2) == [[5, 3], [5, 3]]
