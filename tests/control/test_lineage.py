"""The lineage table answers ⟨layer, matrix⟩ → pruned columns."""

from types import SimpleNamespace

import pytest
import torch

from zeroresize.control.plan_execution import LineageTable
from zeroresize.plan.layer import LayerPlan


@pytest.fixture
def layers():
    return {"fc1": SimpleNamespace(plan=None), "fc2": SimpleNamespace(plan=None)}


@pytest.fixture
def table(layers):
    return LineageTable(layers)


@pytest.mark.parametrize("matrix", ["x", "w"])
def test_both_operands_of_a_layer_are_pruned_alike(layers, table, matrix):
    layers["fc1"].plan = LayerPlan.from_pruned(torch.tensor([3, 1]), 4)

    assert table.pruned("fc1", matrix).tolist() == [1, 3]
    assert table.pruned("fc2", matrix) is None


def test_a_layer_that_is_not_balanced_is_named_with_those_that_are(table):
    with pytest.raises(KeyError, match=r"'fc3': there are \['fc1', 'fc2'\]"):
        table.pruned("fc3", "x")


@pytest.mark.parametrize("matrix", ["dw", "y", "", None])
def test_another_matrix_is_an_error_that_names_the_two(table, matrix):
    with pytest.raises(ValueError, match=rf"matrix_name={matrix!r} is not allowed: choose one of \['x', 'w'\]"):
        table.pruned("fc1", matrix)
