"""The sum of gradients over replicas holds few copies, and a parameter without a gradient counts as one with zeros."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from zeroresize.strategy.placement import gradient_sum


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_few_sums_are_under_way_and_missing_gradients_are_zeros(monkeypatch, num_replicas):
    flats, most = [], 0

    def start(flat, group):
        nonlocal most
        reference = weakref.ref(flat)
        flats.append(reference)
        most = max(most, sum(one() is not None for one in flats))
        return SimpleNamespace(wait=lambda: reference().mul_(num_replicas))

    monkeypatch.setattr(gradient_sum, "group_size", lambda group: num_replicas)
    monkeypatch.setattr(gradient_sum, "start_all_reduce", start)
    monkeypatch.setattr(gradient_sum, "_BUCKET_BYTES", 32)  # two gradients
    parameters = {number: nn.Parameter(torch.ones(4)) for number in range(12)}
    for number, parameter in parameters.items():
        parameter.grad = torch.full((4,), float(number)) if number % 3 else None
    optimizer_placement = SimpleNamespace(groups=SimpleNamespace(dp=None), position=0, masters=parameters)
    gradient_sum.sum_gradients(optimizer_placement, [SimpleNamespace(spec=SimpleNamespace(division=None))] * 12)
    for number, parameter in parameters.items():
        assert parameter.grad.tolist() == [float(num_replicas * number if number % 3 else 0)] * 4
    assert (len(flats), most) == ((6, 2) if num_replicas > 1 else (0, 0))
