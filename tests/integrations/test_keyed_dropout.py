"""Dropout within segments, keyed by the unit: which modules are replaced, and that a step is the same on any owner."""

import pytest
import torch
import torch.nn.functional as F
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import assert_any_owner_computes_the_same
from test_find_segments import WIDTH, Layers, mlp, module
from torch import nn

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.integrations.find_segments import find_segments
from zeroresize.layers.unit_dropout import KeyedDropout, UnitDropout, why_not_keyable

pytestmark = pytest.mark.slow


def found_in(model, group):
    """The segments before those whose dropout cannot be keyed are taken out, and why the others stay even."""
    zr.convert(model, process_group=group)
    return find_segments(model, balanced_layers(model), 2)


def from_the_first_call(model, compute):
    for layer in model.modules():
        if isinstance(layer, UnitDropout):
            layer.num_calls = 0
    return compute(model)


@on_ranks(2)
def test_a_step_with_dropout_is_the_same_whoever_owns_a_neuron(rank, group):
    torch.manual_seed(0)
    model = nn.Sequential(mlp(Layers(group), nn.Dropout(0.3)), nn.Dropout(0.0), mlp(Layers(group), nn.Dropout(0.3)))
    segments, _ = found_in(model, group)
    torch.manual_seed(rank)
    assert why_not_keyable(model, segments) == {}
    KeyedDropout(model, segments, seed=1)
    assert isinstance(model[0][1], UnitDropout) and type(model[1]) is nn.Dropout
    assert model[0][1].seed != model[2][1].seed
    x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_any_owner_computes_the_same(
        model, segments, lambda model: from_the_first_call(model, lambda model: model(x)), group
    )
    again, reasons = found_in(model, group)  # with the keyed ones between
    assert [one.name for one in again] == [one.name for one in segments] and reasons == {}
    KeyedDropout(model, again, seed=1)
    assert model[0][1].segment is again[0]


def in_a_function(layers):
    return module(lambda self, x: self.b(F.dropout(self.a(x), 0.5, self.training)), a=layers.col(), b=layers.row())


def used_after_the_row_too(layers):
    return module(
        lambda self, x: self.drop(self.b(self.drop(self.a(x)))), a=layers.col(), b=layers.row(), drop=nn.Dropout(0.5)
    )


def in_two_modules(layers):
    drop = nn.Dropout(0.5)
    return nn.Sequential(mlp(layers, drop), drop)


@on_ranks(2, [(in_a_function,), (used_after_the_row_too,), (in_two_modules,)])
def test_what_cannot_be_keyed_is_told_and_stays(rank, group, build_model):
    model = build_model(Layers(group))
    segments, _ = found_in(model, group)
    assert len(segments) == 1
    assert list(why_not_keyable(model, segments)) == [segments[0].name]
    assert not any(isinstance(one, UnitDropout) for one in model.modules())
