"""Copies of models in training, as averages of weights need them: whole layers, in no balancer's hands."""

import copy
import io
import pickle

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.virtual_training import Run
from torch import nn
from torch.optim.swa_utils import AveragedModel

import zeroresize as zr
from zeroresize.config.keys import MIGRATION_TRANSPORTS
from zeroresize.conversion import balanced_layers

FORCED = {"ratio": 0.5, "ranks": [1]}

CONFIGS = {
    "off": {"mode": "off"},
    "prunes": {"mode": "zero-pri", "priority": "variation", "paper": {"imputation": "same"}, **FORCED},
    **{
        migration_transport: {"mode": "mig", "migration_transport": migration_transport, **FORCED}
        for migration_transport in MIGRATION_TRANSPORTS
    },
}

COPIES = {
    "deepcopy": copy.deepcopy,
    "average": lambda model: AveragedModel(model).module,
    "copies of the layers": lambda model: shallow_copy(model),
}


def shallow_copy(model):
    other = copy.copy(model)
    other._modules = {name: copy.copy(module) for name, module in model.named_children()}
    return other


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    copies = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return copies


@pytest.mark.slow
@on_ranks(2, zip(CONFIGS, (*COPIES, "deepcopy"), strict=True))
def test_a_copy_is_whole_and_in_no_balancers_hands(rank, group, config, copies):
    def check(run, group, make_copy):
        copied = make_copy(run.model)
        assert list(balanced_layers(copied)) == ["up", "down"]
        for layer in balanced_layers(copied).values():
            assert layer.process_group is group
            assert layer.plan is layer.loans is layer.last is layer.watch_input is None
            assert layer.probes._probes == ()
        whole = zr.convert(type(run.model)(group), process_group=group)
        whole.load_state_dict(copied.state_dict())
        for actual, expected in zip(gradients(copied, run.x), gradients(whole, run.x), strict=True):
            assert torch.equal(actual, expected)

    losses = []
    for is_copied in (False, True):
        run = Run(group, **CONFIGS[config])
        run.steps(4)
        if is_copied:
            check(run, group, COPIES[copies])
        losses.append(run.steps(4))
    assert losses[0] == losses[1], "the model itself goes on as if it had not been copied"


@on_ranks(2)
def test_weights_that_layers_share_are_shared_in_the_copy(rank, group):
    first, second = (zr.ColumnParallelLinear(4, 8, process_group=group) for _ in range(2))
    second.weight = first.weight
    copied = copy.deepcopy(nn.ModuleList([first, second, first]))
    assert copied[0].weight is copied[1].weight is not first.weight
    assert copied[0] is copied[2]


@on_ranks(2)
def test_a_model_cannot_be_pickled_and_the_error_says_what_to_save(rank, group):
    run = Run(group, mode="mig", **FORCED)
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(TypeError, match=r"ColumnParallelLinear .*process group: save model.state_dict\(\) instead"):
            save(run.model)
    torch.save(run.model.state_dict(), io.BytesIO())


@on_ranks(2)
def test_an_average_is_restored_from_its_state_and_can_be_copied(rank, group):
    """Hooks of torch hold their module weakly, and a copy of such a hook must hold the module's copy."""
    run = Run(group)
    run.steps(2)
    average = AveragedModel(run.model)
    state = {name: value.clone() for name, value in average.state_dict().items()}
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.add_(1.0)
    again = copy.deepcopy(average)
    for each in (average, again):
        each.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in each.state_dict().items())
    assert again.module.up is not average.module.up is not run.model.up
