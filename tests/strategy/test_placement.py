"""What a rank holds of a model: layers hear of their units, and gradients are summed over replicas in few messages."""

import weakref
from types import SimpleNamespace

import torch
from helpers.strategies import layers_of
from torch import nn

from zeroresize.layers.segment import Segment
from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.placement import placement as module
from zeroresize.strategy.placement.placement import Placement


def test_few_sums_are_under_way_and_missing_gradients_are_zeros(monkeypatch):
    flats, most = [], 0

    def start(flat, group):
        nonlocal most
        reference = weakref.ref(flat)
        flats.append(reference)
        assert len({int(value) % 2 for value in flat if value}) <= 1, "divided and undivided ones are summed apart"
        most = max(most, sum(each() is not None for each in flats))
        return SimpleNamespace(wait=lambda: reference().mul_(group))

    monkeypatch.setattr(module, "group_size", lambda group: group)
    monkeypatch.setattr(module, "start_all_reduce", start)
    monkeypatch.setattr(module, "_BUCKET_BYTES", 32)  # two gradients
    for num_replicas, num_sums in ((1, 0), (2, 6)):
        flats, most = [], 0
        parameters = {number: nn.Parameter(torch.ones(4)) for number in range(12)}
        for number, parameter in parameters.items():
            parameter.grad = torch.full((4,), float(number)) if number % 3 else None
        tensors = [SimpleNamespace(spec=SimpleNamespace(division=number % 2 or None)) for number in range(12)]
        groups = SimpleNamespace(dp=num_replicas)
        Placement(None, 0, tensors, None, 0, groups, {}, parameters, parameters).sum_gradients()
        for number, parameter in parameters.items():
            assert parameter.grad.tolist() == [float(num_replicas * number if number % 3 else 0)] * 4
        assert (len(flats), most) == (num_sums, min(num_sums, 2))


def test_layers_hear_which_units_they_have(run_ranks):
    def check(rank, group):
        heard = {}

        def segments(number, layer):
            return [Segment(["up"], "down", on_change=lambda units: heard.setdefault(number, units))] * (
                number in (1, 2)
            )

        strategy = Strategy(1, 2, shares=(1, 2))
        SwitchableModel(layers_of(), strategies=[strategy], process_group=group, segments=segments)
        return heard

    assert run_ranks(check, 2) == [{1: list(units), 2: list(units)} for units in (range(4), range(4, 12))]
