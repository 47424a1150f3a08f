"""Kinds of optimizer state, by plain values; what is told of a parameter, and what comes back."""

import json
from dataclasses import asdict

import pytest
import torch

from zeroresize.resharding.parameter_state import (
    GRADIENT,
    MASTER,
    MASTER_GRADIENT,
    PARAMETER,
    STATE,
    Description,
    ParameterState,
    agreed_descriptions,
)


def stepped_once(master=False):
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    stepped = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.float64)) if master else parameter
    optimizer = torch.optim.AdamW([stepped])
    stepped.grad = torch.ones_like(stepped)
    optimizer.step()
    return parameter, stepped, optimizer


def test_all_of_the_parameters_shape_is_there_and_described():
    parameter, stepped, optimizer = stepped_once(master=True)
    state = ParameterState("weight", parameter, stepped, optimizer)
    assert list(state.tensors) == [PARAMETER, MASTER, MASTER_GRADIENT, STATE + "exp_avg", STATE + "exp_avg_sq"]
    description = state.description(4)
    assert description.dtypes[PARAMETER] == "float32" and description.dtypes[STATE + "exp_avg"] == "float64"
    assert description.kept == {"step": ["float32", "cpu", [], 1.0]}
    assert Description(**json.loads(json.dumps(asdict(description)))) == description
    assert state.device_of(GRADIENT) == parameter.device


def test_state_that_cannot_be_divided_and_sparse_gradients_are_refused():
    for value, form in ((torch.zeros(4), r"of shape \(4,\)"), ([torch.zeros(4, 3)], "as a list")):
        parameter, stepped, optimizer = stepped_once()
        optimizer.state[parameter]["rows"] = value
        state = ParameterState("weight", parameter, stepped, optimizer)
        with pytest.raises(ValueError, match=f"weight: its optimizer keeps 'rows' {form} beside a parameter of shape"):
            state.description(4)
        if isinstance(value, torch.Tensor):  # without units it is nobody's
            assert "rows" not in state.description(0).kept
    parameter.grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(ValueError, match=r"weight: a gradient of layout torch\.sparse_coo cannot move"):
        ParameterState("weight", parameter, None, None).description()


def test_ranks_agree_on_the_state_of_those_that_have_units():
    holder = Description("weight", 3, {PARAMETER: "float32", STATE + "a": "float32"}, {"step": ["", "", [], 4]})
    bare = Description("weight", 0, {PARAMETER: "float32"})
    learning = Description("weight", 1, {**holder.dtypes, GRADIENT: "float32"}, holder.kept)
    (agreed,) = agreed_descriptions([[bare], [holder], [learning]])
    assert agreed == Description("weight", 0, learning.dtypes, holder.kept)
    for other, what in (
        (Description("weight", 1, holder.dtypes, {"step": ["", "", [], 5]}), "different optimizer state"),
        (Description("weight", 1, {PARAMETER: "float32"}, holder.kept), "different tensors"),
        (Description("weight", 1, {**holder.dtypes, GRADIENT: "bfloat16"}, holder.kept), "gradients of weight are of"),
    ):
        with pytest.raises(RuntimeError, match=what):
            agreed_descriptions([[learning], [bare], [other]])
