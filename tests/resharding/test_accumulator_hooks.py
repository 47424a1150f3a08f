"""Hooks on gradient accumulators, as overlapping reducers put them, outlive moves, and nothing outlives them."""

import gc
import re
import weakref

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import WIDTH, block, home, segments_of, uneven
from helpers.virtual_training import FEATURES, Pair
from torch import nn

import zeroresize as zr
from zeroresize.pipeline import Pipeline, move_layers
from zeroresize.resharding.parameter_state import replace_data
from zeroresize.resharding.units.moving_units import move_units


def accumulator(parameter):
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


class Reducer:
    """As apex's and older Megatron's: a hook on each accumulator, which is held."""

    def __init__(self, model):
        self.calls, self.nodes = [], []
        for name, parameter in model.named_parameters():
            node = accumulator(parameter)
            node.register_hook(self.hook_of(name, parameter))
            self.nodes.append(node)

    def hook_of(self, name, parameter):
        return lambda *_: self.calls.append((name, tuple(parameter.grad.shape)))


@on_ranks(2)
def test_every_hook_is_called_at_home_away_and_at_home_again(rank, group):
    model = block(group)
    segments, reducer = segments_of(model, group), Reducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for targets in (home(2), uneven(2), uneven(2, 1), home(2), uneven(2), home(2)):
        move_units(segments, targets, process_group=group, optimizer=optimizer)
        reducer.calls.clear()
        model(torch.ones(2, 3, WIDTH, dtype=torch.float64)).sum().backward()
        expected = sorted((name, tuple(one.shape)) for name, one in model.named_parameters())
        assert sorted(reducer.calls) == expected
        optimizer.step()


def backward(parameter):
    parameter.grad = None
    parameter.sum().backward()


def test_hooks_stay_over_many_moves_and_handles_and_later_hooks_too():
    parameter, calls = nn.Parameter(torch.ones(3)), []
    node = accumulator(parameter)
    handles = [node.register_hook(lambda *_, number=number: calls.append(number)) for number in range(2)]
    for size in range(1, 500):
        replace_data(parameter, torch.ones(size % 5), None)
    gc.collect()
    backward(parameter)
    assert calls == [0, 1]
    handles[0].remove()
    node.register_hook(lambda *_: calls.append(2))  # on the first one
    accumulator(parameter).register_hook(lambda *_: calls.append(3))  # on the present one
    for size in (3, 5):
        replace_data(parameter, torch.ones(size), None)
        calls.clear()
        backward(parameter)
        assert calls == [1, 2, 3]


def test_hooks_before_accumulation_stay_and_may_change_the_gradient():
    parameter = nn.Parameter(torch.ones(3))
    node = accumulator(parameter)
    node.register_prehook(lambda gradients: (2 * gradients[0],))
    node.register_prehook(lambda gradients: None)
    for size in (5, 2):
        replace_data(parameter, torch.ones(size), None)
        backward(parameter)
        assert torch.equal(parameter.grad, torch.full((size,), 2.0))
    assert node is not None


def test_a_parameter_goes_with_the_last_who_holds_it():
    parameter = nn.Parameter(torch.ones(3))
    node = accumulator(parameter)
    node.register_hook(lambda *_: None)
    for size in (2, 3):
        replace_data(parameter, torch.ones(size), None)
    data = weakref.ref(parameter)
    del node, parameter
    gc.collect()
    assert data() is None


@on_ranks(2, [["before"], ["before, on one rank"], ["after, on one rank"]], timeout_s=20)
def test_a_gradient_of_fixed_size_beside_a_parameter_is_told_and_no_unit_moves(rank, group, when):
    model = Pair(group)
    optimizer, config = torch.optim.SGD(model.parameters(), lr=0.1), zr.BalanceConfig()
    zr.convert(model, process_group=group)
    buffer = torch.zeros(model.up.weight.numel())
    if when == "before" or (when == "before, on one rank" and rank == 0):
        model.up.weight.main_grad = buffer.view_as(model.up.weight)
    balancer = zr.Balancer(model, optimizer, process_group=group, config=config)
    if when == "after, on one rank" and rank == 0:
        model.up.weight.main_grad = buffer
    with pytest.raises((ValueError, RuntimeError), match=r"up\.weight has an attribute 'main_grad'") as error:
        balancer.move([3, 1])
    assert model.up.weight.shape == (2 * FEATURES, FEATURES)
    named = re.search(r"ranks? \[?0\]? of the group", str(error.value))
    assert rank == 0 or bool(named) == (when != "before")
    balancer.close()


@on_ranks(2, timeout_s=20)
def test_a_layer_with_a_gradient_of_fixed_size_stays_on_its_stage(rank, group):
    layers = [nn.Linear(4, 4) for _ in range(4)]
    pipeline = Pipeline(layers, nn.functional.mse_loss, num_microbatches=2, process_group=group)
    layers[1].weight.main_grad = torch.zeros(16) if rank == 0 else None
    expected = "layers.1.weight has an attribute 'main_grad'" if rank == 0 else r"ranks \[0\] of the group failed"
    with pytest.raises((ValueError, RuntimeError), match=expected):
        move_layers(pipeline, (0, 1, 4), optimizer=None)
    move_layers(pipeline, (0, 3, 4), optimizer=None)
