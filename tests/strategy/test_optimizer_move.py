"""The optimizer moves with its state, bit for bit, also to other ranks; training goes on as if it had not."""

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.strategies import FOUR, assert_holds, layers_of, own_part, whole_tensors

from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.step_trainer import clip_grad_norm_

THREE = Strategy(1, 1, 3, ranks=(3, 0, 2))
OPTIMIZER_STRATEGIES = [FOUR[1], FOUR[4], THREE, FOUR[0], Strategy(1, 1, 1, ranks=(2,)), FOUR[2], FOUR[1]]


def optimizer_of(named_parameters):
    """Without weight decay for tensors of one dimension."""
    groups = {True: [], False: []}
    for _, parameter in named_parameters:
        groups[parameter.dim() > 1].append(parameter)
    return torch.optim.AdamW([{"params": groups[True]}, {"params": groups[False], "weight_decay": 0.0}], lr=0.1)


def give_gradients(model, wholes, step):
    """Of the whole model, and of what this rank has of it; summed over the replicas they are the same."""
    for number, (name, whole) in enumerate(wholes.items()):
        torch.manual_seed(1000 * step + number)
        whole.grad = torch.randn_like(whole)
        parameter = dict(model.named_parameters()).get(name)
        if parameter is not None and model.position.replica == 0:
            parameter.grad = own_part(model, model.optimizer_strategy, name, whole.grad).clone()
    model.collect()


@pytest.mark.slow
@on_ranks(4)
def test_the_optimizer_moves_with_its_state_bit_for_bit(rank, group):
    wholes = whole_tensors(layers_of())
    whole_optimizer = optimizer_of(wholes.items())
    model = SwitchableModel(
        layers_of(), strategies=dict.fromkeys(OPTIMIZER_STRATEGIES), process_group=group, max_bytes=1000
    )
    optimizer = optimizer_of(model.named_parameters())
    rounds = []
    for step, optimizer_strategy in enumerate(OPTIMIZER_STRATEGIES):
        report = model.move_optimizer(optimizer_strategy, optimizer)
        assert model.optimizer_strategy == model.current == optimizer_strategy
        assert sum(len(one["params"]) for one in optimizer.param_groups) == len(list(model.parameters()))
        rounds.append(report.num_rounds)
        give_gradients(model, wholes, step)
        whole_norm = torch.nn.utils.clip_grad_norm_(wholes.values(), 5.0)
        norm = clip_grad_norm_(model, 5.0)
        assert float(norm) == pytest.approx(float(whole_norm), rel=1e-12) and norm > 5.0
        for name, parameter in model.named_parameters():  # the norms may differ in the last bit
            torch.testing.assert_close(
                parameter.grad, own_part(model, optimizer_strategy, name, wholes[name].grad), rtol=1e-12, atol=0.0
            )
            parameter.grad = own_part(model, optimizer_strategy, name, wholes[name].grad).clone()
        for stepped in (optimizer, whole_optimizer):
            stepped.step()
            stepped.zero_grad()
        model.switch_to(FOUR[0], gradients=False)
        assert_holds(model, wholes)
        model.collect()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            expected = whole_optimizer.state[wholes[name]]
            assert optimizer.state[parameter].keys() == expected.keys()
            assert torch.equal(optimizer.state[parameter]["step"], expected["step"])
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(
                    optimizer.state[parameter][key], own_part(model, optimizer_strategy, name, expected[key])
                ), name
        assert len(optimizer.state) == len(list(model.parameters()))
    assert max(rounds) > 1
