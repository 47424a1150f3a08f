"""ZERO-PriDiff's ratios, on plain numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.config import BalanceConfig
from zeroresize.plan.group import Relief
from zeroresize.policy.tensor.columns.priority import budget_ratios
from zeroresize.policy.tensor.columns.selector import ColumnSelector
from zeroresize.policy.tensor.rules.paper import pridiff_ratios

statistics = st.lists(st.floats(0.0, 1e3), min_size=4, max_size=40).map(np.array)
ratios = st.floats(0.05, 0.9)
layers = st.lists(st.tuples(statistics, st.floats(0.1, 10.0)), min_size=1, max_size=6)


@given(layers, ratios)
def test_the_budget_rule_prunes_what_was_asked_for(layers, ratio):
    w_vars, costs = [w_var for w_var, _ in layers], [cost for _, cost in layers]
    ratio_of_layers = budget_ratios(w_vars, costs, ratio, max_ratio=0.9)
    # Caps are whole columns, so small layers may not reach γ_max.
    reachable = sum(cost * int(0.9 * len(w) + 1e-9) / len(w) for w, cost in layers)
    wanted = min(ratio * sum(costs), reachable)
    largest_column = max(cost / len(w) for w, cost in layers)
    assert sum(r * cost for r, cost in zip(ratio_of_layers, costs, strict=True)) == pytest.approx(
        wanted, abs=largest_column
    )
    assert all(0.0 <= r <= 0.9 for r in ratio_of_layers)


@given(layers, ratios)
def test_the_budget_rule_has_one_threshold_for_all_layers(layers, ratio):
    w_vars, costs = [w_var for w_var, _ in layers], [cost for _, cost in layers]
    ratio_of_layers = budget_ratios(w_vars, costs, ratio, max_ratio=0.9)
    counts = [round(r * len(w)) for r, w in zip(ratio_of_layers, w_vars, strict=True)]
    pruned = [np.sort(w)[:count] for w, count in zip(w_vars, counts, strict=True)]
    tau = max((values.max() for values in pruned if len(values)), default=-np.inf)
    for w, count in zip(w_vars, counts, strict=True):
        if count < int(0.9 * len(w) + 1e-9):
            assert np.sort(w)[count] >= tau


def test_a_layer_of_which_nothing_is_known_prunes_what_all_do():
    moving, still, unknown = np.linspace(1, 2, 40), np.zeros(40), np.full(40, np.nan)
    ratio_of_layers = budget_ratios([moving, unknown, still], [1.0, 5.0, 1.0], 0.5, max_ratio=0.9)
    assert ratio_of_layers[1] == 0.5
    assert ratio_of_layers[2] == 0.9 and ratio_of_layers[0] == pytest.approx(0.1)


def test_the_paper_rule_may_prune_more_than_asked_for_or_less():
    still, moving = np.full(10, 1e-4), np.full(10, 1.0)
    rule = {"pridiff_rule": "paper", "theta_iter": 1e-4, "alpha": 0.8}
    config = BalanceConfig(mode="zero-pridiff", priority="variation", paper=rule)
    assert pridiff_ratios(config, [still, moving], 0.5, 10, 0.9) == pytest.approx([0.9, 0.4])
    assert pridiff_ratios(config, [moving, moving * np.nan], 0.5, 10, 0.9) == pytest.approx([0.4, 0.4])
    assert pridiff_ratios(config, [still, moving], 0.0, 10, 0.9) == [0.0, 0.0], "who is no straggler prunes nothing"


def ratios_by(scores, **config):
    columns = {name: len(own) for name, own in scores.items()}
    selector = ColumnSelector(BalanceConfig(mode="zero-pridiff", **config), 0, columns, dict.fromkeys(columns, 1.0))
    selector.end_epoch(scores, incremental=False)
    return selector.layer_ratios(Relief(0.5))


def test_activation_scores_are_compared_by_their_share_of_a_product():
    """Its error is what is left out of it relative to the whole, so the scale of a layer's inputs says nothing."""
    rng = np.random.default_rng(0)
    even, uneven = rng.uniform(0.9, 1.1, 64), np.exp(rng.normal(0.0, 2.0, 64))
    ratios = ratios_by({"even": even, "uneven": uneven}, priority="activation")
    assert ratios["uneven"] > 0.7 and sum(ratios.values()) == pytest.approx(1.0, abs=0.02)
    assert ratios_by({"even": 1e3 * even, "uneven": uneven}, priority="activation") == ratios
    assert ratios_by({"even": even, "uneven": 1e3 * uneven}, priority="activation") == ratios
    assert ratios_by({"even": even, "twice": 2.0 * even}, priority="activation") == {"even": 0.5, "twice": 0.5}
