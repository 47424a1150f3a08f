"""What a ratio means on one rank: which columns of which layer."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zeroresize.config import BalanceConfig
from zeroresize.plan.group import Relief
from zeroresize.policy.tensor.columns.selector import ColumnSelector


def test_a_forced_ratio_is_kept_to_the_column_and_a_decided_one_aligned():
    config, work = BalanceConfig(mode="zero-pri"), {"small": 1.0, "large": 1.0}
    selector = ColumnSelector(config, 0, {"small": 48, "large": 768}, work)
    forced = selector.pruned_columns(Relief(0.3, is_forced=True))
    decided = selector.pruned_columns(Relief(0.3))
    assert {name: len(columns) for name, columns in forced.items()} == {"small": 14, "large": 230}
    assert {name: len(columns) for name, columns in decided.items()} == {"small": 14, "large": 232}
    assert set(forced["large"]) < set(decided["large"])


@given(
    st.integers(2, 800), st.floats(0, 1), st.floats(0, 1), st.sampled_from([0.5, 0.9, 0.95, 0.99]), st.integers(1, 3)
)
@example(num_columns=384, spared=1.0, part=0.99, max_ratio=0.99, block=1)
@example(num_columns=8, spared=1.0, part=0.5, max_ratio=0.95, block=1)
def test_what_is_pruned_beside_a_loan_stays_within_the_largest_ratio(num_columns, spared, part, max_ratio, block):
    config = BalanceConfig(mode="semi", max_ratio=max_ratio, block=block)
    selector = ColumnSelector(config, 0, {"layer": num_columns}, {"layer": 1.0})
    relief = Relief(pruned=max_ratio * spared * part, lent=max_ratio * spared * (1.0 - part))
    pruned, lent = selector.pruned_columns(relief)["layer"], selector.lent_columns(relief)["layer"]
    assert set(pruned).isdisjoint(lent)
    assert not len(pruned) or len(pruned) + len(lent) <= max_ratio * num_columns + 1e-9


@pytest.mark.parametrize("mode", ["zero-rd", "zero-pridiff", "semi"])
def test_however_layers_differ_no_segment_waits_for_a_straggler_that_prunes_another(mode):
    """Ranks meet after each segment, so time that one saves is no help in the other."""
    columns = {name: 64 for name in ("query", "value", "out", "fc1", "fc2")}
    costs = {"query": 1.0, "value": 1.0, "out": 1.0, "fc1": 4.0, "fc2": 4.0}
    segments = [["query", "value", "out"], ["fc1", "fc2"]]
    selector = ColumnSelector(BalanceConfig(mode=mode), 0, columns, costs, segments)
    rng = np.random.default_rng(0)
    selector.end_epoch({name: rng.random(64) * (1 + 9 * (name > "o")) for name in columns}, incremental=False)
    for ratio in (0.1, 0.5, 0.8):
        ratios = selector.layer_ratios(Relief(ratio))
        for segment in segments:
            spared = sum(costs[name] * ratios[name] for name in segment) / sum(costs[name] for name in segment)
            assert spared == pytest.approx(ratio, abs=0.02)


def test_what_is_known_of_columns_goes_with_them_and_the_others_begin_anew():
    def selector_of(rank):
        return ColumnSelector(BalanceConfig(mode="zero-pri", ageing=0.0), rank, {"down": 8}, {"down": 1.0})

    giver, taker = selector_of(0), selector_of(1)
    for selector, first in ((giver, 0.0), (taker, 8.0)):
        for _ in range(3):
            selector.count_step(Relief(0.25, is_forced=True))
        selector.end_epoch({"down": first + np.arange(8.0)}, incremental=False)
        selector.count_step(Relief(0.5, is_forced=True))
    gone = np.array([1, 6])
    known = giver.known_of("down", gone)
    before = taker.known_of("down", np.arange(8))
    edition = taker.edition
    taker.hold({"down": np.array([1, 5, 6, *range(8, 16)])}, {"down": (gone, known)}, {"down": 11 / 8})
    after = taker.known_of("down", np.arange(11))
    assert np.array_equal(after[:, 3:], before) and np.array_equal(after[:, [0, 2]], known)
    assert np.isnan(after[0, 1]) and not after[1:, 1].any(), "a column that nobody tells of"
    assert taker.edition > edition
    # By w_var: what is unknown first, then 1, 6, 8, 9, ...
    assert taker.pruned_columns(Relief(0.5, is_forced=True))["down"].tolist() == [1, 0, 2, 3, 4, 5]
    assert len(taker.lent_columns(Relief(0.0, 1.0, is_forced=True))["down"]) == 11
    taker.hold({"down": np.empty(0, dtype=np.int64)})
    for relief in (Relief(0.5), Relief(0.5, 0.25), Relief(0.9, is_forced=True)):
        assert not len(taker.pruned_columns(relief)["down"]) and not len(taker.lent_columns(relief)["down"])
        taker.count_step(relief)
    taker.end_epoch({"down": np.empty(0)}, incremental=True)


def test_a_rank_computes_equally_much_in_segments_of_which_it_owns_unequal_shares():
    """Whole heads could not be divided as neurons were."""
    columns = {"qkv": 64, "out": 64, "fc1": 64, "fc2": 256}
    segments, costs = [["qkv", "out"], ["fc1", "fc2"]], {"qkv": 3.0, "out": 1.0, "fc1": 4.0, "fc2": 4.0}
    selector = ColumnSelector(BalanceConfig(mode="semi"), 0, columns, costs, segments)
    owned = {"qkv": 1.0, "out": 1.0, "fc1": 0.75, "fc2": 0.75}
    selector.hold({"fc2": np.arange(192)}, costs={name: costs[name] * owned[name] for name in costs})
    ratios = selector.layer_ratios(Relief(0.5))
    computed = {name: owned[name] * (1.0 - ratio) for name, ratio in ratios.items()}
    assert max(computed.values()) == pytest.approx(min(computed.values()))
    dropped = sum(costs[name] * owned[name] * ratio for name, ratio in ratios.items())
    assert dropped == pytest.approx(0.5 * sum(costs[name] * owned[name] for name in costs))
    assert set(selector.layer_ratios(Relief(0.5, is_forced=True)).values()) == {0.5}


@pytest.mark.parametrize(("adds_up", "scale"), [(True, 4.0), (False, 1.0)])
def test_a_statistic_that_began_within_the_epoch_counts_as_one_of_the_whole_epoch(adds_up, scale):
    selector = ColumnSelector(BalanceConfig(mode="zero-pri"), 0, {"layer": 8}, {"layer": 1.0})

    def end_epoch_after(*spells):
        for num_steps in spells:
            selector.state.steps_unseen = selector.state.steps_of_epoch
            for _ in range(num_steps):
                selector.count_step(Relief())
        selector.end_epoch({"layer": np.arange(8.0)}, incremental=True, adds_up=adds_up)
        return selector.state.columns["layer"].w_var.tolist()

    assert end_epoch_after(5, 1, 2) == (scale * np.arange(8.0)).tolist()
    assert end_epoch_after(4) == np.arange(8.0).tolist(), "the next epoch is seen from its beginning"
    assert end_epoch_after(4, 0) == np.arange(8.0).tolist(), "nothing was seen: what was known stays"
