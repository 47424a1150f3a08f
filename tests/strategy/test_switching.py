"""Weights and gradients after any chain of switches are those of the undivided model."""

import itertools

import torch
from switched_models import FOUR, assert_holds, layers_of, own_part, whole_tensors

from zeroresize.strategy.model import SwitchableModel


def test_weights_are_those_of_the_whole_model_after_any_chain_of_switches(run_ranks):
    def check(rank, group):
        wholes = {name: one.detach() for name, one in whole_tensors(layers_of()).items()}
        model = SwitchableModel(layers_of(), strategies=FOUR, process_group=group)
        assert_holds(model, wholes)
        for before, after in itertools.permutations(FOUR, 2):
            model.switch_to(before, gradients=False)
            model.switch_to(after, gradients=False)
            assert_holds(model, wholes)

    run_ranks(check, 4)


def test_gradients_of_all_strategies_are_added_at_home(run_ranks):
    def check(rank, group):
        for home in (FOUR[1], FOUR[4], FOUR[2]):
            model = SwitchableModel(layers_of(), strategies=FOUR, process_group=group, home=home, max_bytes=3000)
            total = {name: torch.zeros_like(one) for name, one in whole_tensors(layers_of()).items()}
            for number, strategy in enumerate([*FOUR, FOUR[0]]):
                model.switch_to(strategy)
                for replica in range(strategy.dp):
                    torch.manual_seed(100 * number + replica)
                    for name in total:
                        whole = torch.randn_like(total[name])
                        total[name] = total[name] + whole
                        part = own_part(model, strategy, name, whole)
                        if part is not None and model.position.replica == replica:
                            add(model, name, part)
            model.collect()
            assert model.current == home
            expected = {name: own_part(model, home, name, whole) for name, whole in total.items()}
            found = {name: one.grad for name, one in model.named_parameters()}
            for name, part in expected.items():
                assert (part is None) == (name not in found)
                if part is not None:
                    torch.testing.assert_close(found[name], part, rtol=0.0, atol=1e-10)

    run_ranks(check, 4)


def add(model, name, gradient):
    _, number, own_name = name.split(".", 2)
    parameter = dict(model.stage_layers[int(number)].named_parameters())[own_name]
    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
