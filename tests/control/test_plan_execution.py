"""What a rank does under a plan, a pin above it, and in a calibration step."""

from types import SimpleNamespace

import pytest
import torch

import zeroresize as zr
from zeroresize.control.plan_execution import LineageTable, PlanExecution
from zeroresize.plan.group import Loan, RankPlan, WorkloadPlan, Workshares
from zeroresize.policy.tensor.columns.selector import ColumnSelector

PLAN = WorkloadPlan(
    (RankPlan(borrowed=0.25), RankPlan(0.5, 0.25, is_straggler=True)), loans=(Loan(1, 0.25, (0,), (1.0,)),)
)


@pytest.fixture
def layers():
    return {
        name: SimpleNamespace(
            local_weight=torch.zeros(4, 64), home_shape=(4, 64), num_columns=64, plan=None, segment=None
        )
        for name in ("up", "down")
    }


def rank_under(layers, rank, **config):
    config = zr.BalanceConfig(**{"mode": "zero-rd", **config})
    selector = ColumnSelector(config, rank, dict.fromkeys(layers, 64), dict.fromkeys(layers, 1.0))
    return selector, PlanExecution(config, rank, 2, layers, selector)


def test_a_rank_does_its_own_part_of_the_plan(layers):
    _, lender = rank_under(layers, 1)
    assert LineageTable(layers).pruned("up", "x") is None
    lender.install(PLAN)
    lender.begin_step()
    assert lender.ratio == 0.75 and lender.lent_to == {0: 0.25}
    assert lender.planned == lender.shares_of_step == Workshares(0.5, 0.25, 0.0)
    assert [(len(layer.plan.pruned), len(layer.plan.lent)) for layer in layers.values()] == [(32, 16)] * 2
    lineage = LineageTable(layers)
    for matrix in ("x", "w"):
        assert lineage.pruned("up", matrix) is layers["up"].plan.pruned
    with pytest.raises(KeyError, match=r"'fc3': there are \['down', 'up'\]"):
        lineage.pruned("fc3", "x")
    with pytest.raises(ValueError, match=r"matrix_name='dw' is not allowed: choose one of \['x', 'w'\]"):
        lineage.pruned("up", "dw")
    _, receiver = rank_under(layers, 0)
    receiver.install(PLAN)
    receiver.begin_step()
    assert receiver.ratio == 0.0 and receiver.lent_to == {}
    assert receiver.planned == receiver.shares_of_step == Workshares(borrowed=0.25)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_calibration_step_does_nothing_of_the_plan_that_is_told(layers, rank):
    _, in_force = rank_under(layers, rank)
    in_force.install(PLAN, WorkloadPlan((RankPlan(), RankPlan())))
    in_force.begin_step()
    assert in_force.shares_of_step == Workshares() and all(layer.plan is None for layer in layers.values())
    assert (in_force.planned.spared, in_force.planned.borrowed) == (PLAN.ranks[rank].spared, PLAN.ranks[rank].borrowed)
    assert set(in_force.layer_shares.values()) == {PLAN.ranks[rank].pruned}
    in_force.install(WorkloadPlan((RankPlan(), RankPlan())))
    assert set(in_force.layer_shares.values()) == {0.0}, "of the plan in force, though layers have computed all before"


def test_a_pin_stands_above_the_plan_until_it_is_released(layers):
    _, in_force = rank_under(layers, 1)
    in_force.pin(1, 0.3)
    in_force.install(PLAN)
    assert in_force.ratio == 0.3 and in_force.is_forced
    assert [len(layer.plan.pruned) for layer in layers.values()] == [19] * 2, "to the column"
    in_force.release(1)
    in_force.install(PLAN)
    assert in_force.ratio == 0.75 and not in_force.is_forced
    in_force.pin(1, 0.3)
    in_force.release(None)
    in_force.install(PLAN)
    assert in_force.ratio == 0.75 and in_force.pins == {}
    for rank, ratio, mode, error in (
        (2, 0.3, "zero-rd", "rank=2 is outside the process group: allowed are 0 to 1"),
        (0, 1.0, "zero-rd", r"ratio=1.0"),
        (0, 0.5, "off", "mode"),
    ):
        with pytest.raises(ValueError, match=error):
            rank_under(layers, 1, mode=mode)[1].pin(rank, ratio)


def test_steps_count_for_the_columns_that_they_pruned(layers):
    selector, in_force = rank_under(layers, 1)
    for plan in (PLAN, WorkloadPlan((RankPlan(),) * 2)):
        in_force.install(plan)
        in_force.begin_step()
        in_force.end_step()
        assert in_force.shares_of_last_step.spared == plan.ranks[1].spared
    assert selector.state.steps_of_epoch == 2
    assert [int(steps.sum()) for steps in selector.pruned_steps.values()] == [32, 32]
