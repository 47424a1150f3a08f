"""The lineage table answers ⟨layer, matrix⟩ → pruned columns."""

import pytest
import torch

from zeroresize.lineage import LineageTable
from zeroresize.plan import LayerPlan


@pytest.fixture
def table():
    return LineageTable({"fc1": 4, "fc2": 6})


@pytest.mark.parametrize("matrix", ["x", "w"])
def test_both_operands_of_a_layer_are_pruned_alike(table, matrix):
    table.record("fc1", LayerPlan.from_pruned(torch.tensor([3, 1]), 4))

    assert table.pruned("fc1", matrix).tolist() == [1, 3]
    assert table.pruned("fc2", matrix) is None


def test_it_holds_the_very_indices_of_the_plan_and_no_copy(table):
    plan = LayerPlan.from_pruned(torch.tensor([0]), 4)
    table.record("fc1", plan)
    assert table.pruned("fc1", "w") is plan.pruned


def test_the_newest_plan_counts_and_none_means_nothing_is_pruned(table):
    table.record("fc1", LayerPlan.from_pruned(torch.tensor([0]), 4))
    table.record("fc1", LayerPlan.from_pruned(torch.tensor([2]), 4))
    assert table.pruned("fc1", "x").tolist() == [2]

    table.record("fc1", None)
    table.record("fc2", None)
    assert table.pruned("fc1", "x") is None
    assert table.pruned("fc2", "w") is None


def test_a_layer_that_is_not_balanced_is_named_with_those_that_are(table):
    for ask in [lambda: table.pruned("fc3", "x"), lambda: table.record("fc3", None)]:
        with pytest.raises(KeyError, match=r"'fc3': there are \['fc1', 'fc2'\]"):
            ask()


@pytest.mark.parametrize("matrix", ["dw", "y", "", None])
def test_another_matrix_is_an_error_that_names_the_two(table, matrix):
    with pytest.raises(ValueError, match=rf"matrix_name={matrix!r} is not allowed: choose one of \['x', 'w'\]"):
        table.pruned("fc1", matrix)
