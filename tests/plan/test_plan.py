"""A layer's plan: kept and pruned columns are sorted, disjoint and all of them together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.plan.group import RankPlan, WorkloadPlan
from zeroresize.plan.layer import LayerPlan


@given(st.integers(1, 60).flatmap(lambda k: st.tuples(st.just(k), st.permutations(range(k)), st.integers(0, k - 1))))
def test_kept_and_pruned_are_sorted_and_make_up_all_columns(drawn):
    num_columns, order, num_pruned = drawn

    plan = LayerPlan.from_pruned(torch.tensor(order[:num_pruned], dtype=torch.int64), num_columns)

    assert plan.pruned.tolist() == sorted(order[:num_pruned])
    assert plan.keep_P.tolist() == sorted(order[num_pruned:])
    assert plan.keep_P.dtype == plan.pruned.dtype == torch.int64
    assert plan.num_columns == num_columns
    assert plan.pruned_share == num_pruned / num_columns


def test_index_lists_lie_on_the_device_of_the_layer():
    plan = LayerPlan.from_pruned(torch.tensor([1]), 3, device="meta")
    assert plan.keep_P.device.type == plan.pruned.device.type == "meta" and plan.imputation == "zero"


def test_impossible_columns_are_errors():
    for pruned, lent, message in (
        ([0, 4], [], r"pruned and lent columns must lie in 0 to 3, found \[0, 4\]"),
        ([-1], [], r"must lie in 0 to 3, found \[-1\]"),
        ([2, 2], [], "different from each other"),
        ([1], [1], "different from each other"),
        ([3, 0, 1, 2], [], "keep at least one of 4 columns"),
        ([0, 1], [2, 3], "keep at least one of 4 columns, or lend all"),  # of which to impute an average
    ):
        with pytest.raises(ValueError, match=message):
            LayerPlan.from_pruned(torch.tensor(pruned), 4, lent=torch.tensor(lent, dtype=torch.int64))


def test_lent_columns_are_neither_kept_nor_pruned_and_stay_in_their_order():
    plan = LayerPlan.from_pruned(torch.tensor([4, 1]), 6, lent=torch.tensor([5, 0]))
    assert (plan.keep_P.tolist(), plan.pruned.tolist(), plan.lent.tolist()) == ([2, 3], [1, 4], [5, 0])
    assert (plan.num_columns, plan.pruned_share, plan.lent_share) == (6, 1 / 3, 1 / 3)
    everything = LayerPlan.from_pruned(torch.tensor([], dtype=torch.int64), 4, lent=torch.arange(4))
    assert everything.lent_share == 1.0 and everything.keep_P.numel() == 0


def test_a_plan_tells_who_prunes_and_lends():
    ranks = RankPlan(borrowed=1.25), RankPlan(0.5, 0.25, is_straggler=True), RankPlan(0.0, 1.0, is_straggler=True)
    plan = WorkloadPlan(ranks)
    assert plan.relieved == [1, 2] and [rank.spared for rank in plan.ranks] == [0.0, 0.75, 1.0]
    assert plan.description == (
        "rank 1 prunes 50 % of its products (nobody computes these) and lends 25 % of its products (other ranks "
        "compute these), rank 2 lends 100 % of its products (other ranks compute these)"
    )
    assert WorkloadPlan((RankPlan(),) * 2).description == "every rank computes all of its products"
