"""Copies of models in training, as averages of weights need them: whole layers, in no balancer's hands."""

import copy
import io
import pickle

import pytest
import torch
from helpers.virtual_training import Run, keep_time
from torch import nn
from torch.optim.swa_utils import AveragedModel

import zeroresize as zr
from zeroresize.config.keys import MIGRATION_TRANSPORTS
from zeroresize.control import start_checks
from zeroresize.convert import balanced_layers

FORCED = {"ratio": 0.5, "ranks": [1]}

CONFIGS = {
    "off": {"mode": "off"},
    "prunes": {"mode": "zero-pri", "priority": "variation", "paper": {"imputation": "same"}, **FORCED},
    **{
        migration_transport: {"mode": "mig", "migration_transport": migration_transport, **FORCED}
        for migration_transport in MIGRATION_TRANSPORTS
    },
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())

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


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES.keys())
@each_config
def test_a_copy_is_whole_and_in_no_balancers_hands(run_ranks, config, make_copy):
    def check(run, group):
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

    def train(rank, group):
        losses = []
        for is_copied in (False, True):
            run = Run(group, **config)
            run.steps(4)
            if is_copied:
                check(run, group)
            losses.append(run.steps(4))
        return losses

    for expected, losses in run_ranks(train, 2):
        assert losses == expected, "the model itself goes on as if it had not been copied"


@pytest.mark.few(2)
@each_config
def test_a_deep_copy_has_weights_of_its_own_and_can_be_balanced_itself(run_ranks, config):
    def check(rank, group):
        run = Run(group, **config)
        run.steps(4)
        copied = copy.deepcopy(run.model)
        before = [parameter.detach().clone() for parameter in copied.parameters()]
        run.steps(2)
        assert all(torch.equal(now, then) for now, then in zip(copied.parameters(), before, strict=True))

        keep_time(run.time, balanced_layers(copied).values())
        optimizer = torch.optim.AdamW(copied.parameters())
        balancer = zr.Balancer(copied, optimizer, process_group=group, config=run.config)
        for _ in range(2):
            copied(run.x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            balancer.step()
        run.steps(2)

    run_ranks(check, 2)


def test_an_average_follows_a_model_that_lends(run_ranks):
    def check(rank, group):
        run = Run(group, mode="mig", **FORCED)
        average, seen = AveragedModel(run.model), []
        for _ in range(3):
            run.steps(1)
            average.update_parameters(run.model)
            seen.append(run.model.up.weight.detach().clone())
        torch.testing.assert_close(average.module.up.weight.detach(), torch.stack(seen).mean(dim=0))

    run_ranks(check, 2)


def test_a_copy_that_was_made_before_training_checks_nothing(run_ranks, monkeypatch):
    """Its forwards are its own affair, also once the balancer is closed."""

    def check(rank, group):
        compared = []
        compare = start_checks.StartCheck.compare
        monkeypatch.setattr(start_checks.StartCheck, "compare", lambda self: compared.append(compare(self)))
        run = Run(group, mode="off")
        copied = copy.deepcopy(run.model).train()
        copied(run.x)
        assert compared == []
        run.steps(2)
        copied(run.x)
        run.balancer.close()
        copied(run.x)
        return len(compared)

    assert run_ranks(check, 2) == [1, 1]


def test_weights_that_layers_share_are_shared_in_the_copy(run_ranks):
    def check(rank, group):
        first, second = (zr.ColumnParallelLinear(4, 8, process_group=group) for _ in range(2))
        second.weight = first.weight
        copied = copy.deepcopy(nn.ModuleList([first, second, first]))
        assert copied[0].weight is copied[1].weight is not first.weight
        assert copied[0] is copied[2]

    run_ranks(check, 2)


@pytest.mark.parametrize("is_balanced", [True, False])
def test_a_model_cannot_be_pickled_and_the_error_says_what_to_save(run_ranks, is_balanced):
    def check(rank, group):
        run = Run(group, mode="mig", **FORCED)
        if not is_balanced:
            run.balancer.close()
        for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises(
                TypeError, match=r"ColumnParallelLinear .*process group: save model.state_dict\(\) instead"
            ):
                save(run.model)
        torch.save(run.model.state_dict(), io.BytesIO())

    run_ranks(check, 2)
