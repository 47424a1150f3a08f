"""Every case trains alike wherever its layers are, goes on from where it was saved, and names options that are none."""

import pytest
import torch
from helpers.language_models import (
    batch,
    check_that_moves_change_nothing,
    check_that_saved_runs_go_on,
    layers_of,
    model_of,
)

from lm_examples.cases import CASES

#: Options of small runs in which the case does something, and those of a run that is saved in its midst.
SOON = {
    "pruning": {"start": 2, "end": 6, "every": 1, "sparse_below": 0.6},
    "freezing": {"every": 2, "window": 1, "patience": 1, "tolerance": 0.9},
    "early_exit": {"threshold": 0.6, "first_exit": 0, "start": 2, "end": 6, "every": 1},
    "mixture_of_depths": {"capacity": 0.25, "predictor_loss": 0.5, "routing": "predictor"},
    "mixture_of_experts": {"num_experts": 4, "balance_loss": 0.5, "capacity_factor": 1.0},
    "sparse_attention": {"num_buckets": 4, "block_size": 2},
}

#: What each shows.
FIGURES = {
    "pruning": ["sparsity"],
    "freezing": ["frozen_layers"],
    "early_exit": ["exited_tokens", "exit_threshold"],
    "mixture_of_depths": ["routed_tokens", "predicted_rightly"],
    "mixture_of_experts": ["expert_imbalance", "dropped_tokens"],
    "sparse_attention": ["attended_pairs"],
}


def case_of(name):
    kind = CASES[name]
    return kind(model_of(context=16), kind.Config(**SOON[name]))


@pytest.mark.parametrize("name", ["early_exit", "mixture_of_depths", "mixture_of_experts", "sparse_attention"])
def test_losses_are_those_of_the_undivided_layers_wherever_layers_are(run_ranks, name):
    losses = check_that_moves_change_nothing(run_ranks, lambda: case_of(name), 8, 3, schedule="gpipe")
    case, expected = case_of(name), []
    layers, (tokens, following) = layers_of(case), batch(case.model, 0)
    for x, target in zip(tokens.chunk(4), following.chunk(4), strict=True):
        for layer in layers:
            x = layer(*x) if isinstance(x, tuple) else layer(x)
        expected.append(case.loss(x, target))
    assert losses[0] == pytest.approx(torch.stack(expected).mean().item(), rel=1e-10)


@pytest.mark.parametrize("name", SOON)
def test_a_saved_run_goes_on(run_ranks, name):
    for figures in check_that_saved_runs_go_on(run_ranks, lambda: case_of(name), 4, 5):
        assert list(figures) == FIGURES[name] and all(value >= 0.0 for value in figures.values())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pruning", [{"final_sparsity": 1.0}, {"every": 300}, {"end": 3000}, {"sparse_below": 1.5}]),
        ("freezing", [{"every": 0}, {"window": 0}, {"tolerance": 1.0}, {"thaw_at_loss": 1}, {"keep_active": 0}]),
        ("early_exit", [{"threshold": -2}, {"every": 0}, {"end": -1}, {"first_exit": 4}]),
        ("mixture_of_depths", [{"capacity": 1.1}, {"every": 0}, {"routing": "both"}, {"predictor_loss": 0}]),
        ("mixture_of_experts", [{"num_experts": 0}, {"top_k": 9}, {"capacity_factor": 0}, {"balance_loss": -1}]),
        ("sparse_attention", [{"num_buckets": 3}, {"block_size": 0}, {"block_size": 5}]),
    ],
)
def test_options_that_are_not_allowed_are_named(name, options):
    kind = CASES[name]
    for each in options:
        (key,) = each
        with pytest.raises(ValueError, match=rf"case\.{key}="):
            kind(model_of(context=16), kind.Config(**each))
