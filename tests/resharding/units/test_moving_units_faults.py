"""What cannot move is refused before anything has; faults of ranks are in test_engine_faults.py."""

import numpy as np
import pytest
import torch
from helpers import parallel_layers
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import held, home, same, segments_of, uneven

from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.resharding.units.moving_units import move_units


def with_tensor(segments, dim, rows):
    segments[1].tensors = (UnitTensor(segments[1].tensors[0].owner, "weight", "w", dim, rows),)
    return uneven(2)


def with_least_units(segments, _):
    segments[0].min_units = 2
    return uneven(2)


def with_one_parameter_twice(segments, _):
    segments[1].tensors, segments[1].owned = (segments[0].tensors[0],), segments[0].owned
    return dict.fromkeys(("0.out", "1.down"), uneven(2)["0.out"])


def with_state(value):
    def change(segments, optimizer):
        optimizer.state[segments[1].tensors[0].parameter]["rows"] = value
        return uneven(2)

    return change


REFUSED = [
    ("dimension 1 must be", lambda segments, _: with_tensor(segments, 1, (1,))),
    (r"units of 1 \+ 1 \+ 1 rows", lambda segments, _: with_tensor(segments, 0, (1, 1, 1))),
    (r"given for \['other'\], which are no segments", lambda *_: {"other": home(2)["0.out"]}),
    (r"every rank must keep 2 units, found \[1, 11\]", with_least_units),
    ("of two segments are one parameter", with_one_parameter_twice),
    (r"'rows' of shape \(7,\)", with_state(torch.zeros(7))),
    ("'rows' as a list", with_state([torch.zeros(2)])),
]


@on_ranks(2, REFUSED)
def test_what_does_not_fit_or_cannot_be_divided_is_refused(rank, group, expected, change):
    model = parallel_layers.block(group)
    optimizer, segments = torch.optim.AdamW(model.parameters()), segments_of(model, group)
    model(torch.ones(2, 3, parallel_layers.WIDTH, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    targets = change(segments, optimizer)
    owned = [segment.owned for segment in segments]
    objects, values = held(segments_of(model, group), optimizer)
    with pytest.raises(ValueError, match=expected):
        move_units(segments, targets, process_group=group, optimizer=optimizer)
    assert [segment.owned for segment in segments] == owned
    now, values_now = held(segments_of(model, group), optimizer)
    assert now == objects and same(values_now, values)


def test_with_one_element_the_step_stays_a_step(run_ranks):
    """Its shape is the parameter's by accident; moments of one element travel all the same."""

    def check(rank, group):
        owner = torch.nn.Module()
        owner.bias = torch.nn.Parameter(torch.full((1,), float(rank)))
        optimizer = torch.optim.Adam([owner.bias])
        optimizer.state[owner.bias] = {"step": torch.full((1,), 5.0), "exp_avg": torch.full((1,), 10.0 + rank)}
        tensors = (UnitTensor(owner, "bias", "bias", 0, (1,)),)
        segment = OwnedSegment("s", "units", ("s",), tensors, OwnershipMap.home(2, 2))
        move_units([segment], {"s": OwnershipMap(np.array([0, 0]), 2)}, process_group=group, optimizer=optimizer)
        return {"bias": owner.bias.tolist(), **{key: one.tolist() for key, one in optimizer.state[owner.bias].items()}}

    first, second = run_ranks(check, 2)
    assert first == {"bias": [0.0, 1.0], "step": [5.0], "exp_avg": [10.0, 11.0]}
    assert second == {"bias": [], "step": [5.0], "exp_avg": []}
