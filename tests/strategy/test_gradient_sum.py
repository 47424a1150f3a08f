"""The sum of gradients over replicas holds few copies, and a parameter without a gradient counts as one with zeros."""

import weakref
from types import SimpleNamespace

import torch
from torch import nn

from zeroresize.strategy.placement import placement as module
from zeroresize.strategy.placement.placement import Placement


def test_few_sums_are_under_way_and_missing_gradients_are_zeros(monkeypatch):
    flats, most = [], 0

    def start(flat, group):
        nonlocal most
        reference = weakref.ref(flat)
        flats.append(reference)
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
        placement = Placement(None, None, 0, SimpleNamespace(dp=num_replicas), {}, parameters, parameters)
        placement.sum_gradients([SimpleNamespace(spec=SimpleNamespace(division=None))] * 12)
        for number, parameter in parameters.items():
            assert parameter.grad.tolist() == [float(num_replicas * number if number % 3 else 0)] * 4
        assert (len(flats), most) == (num_sums, min(num_sums, 2))
