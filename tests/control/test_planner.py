"""Planner: a balancer works with whoever decides, GroupDecision or another."""

import inspect

import pytest
from helpers.virtual_training import Run

import zeroresize as zr
from zeroresize.control import assembly
from zeroresize.control.group_decision import GroupDecision
from zeroresize.control.planner import Planner
from zeroresize.plan.group import RankPlan, WorkloadPlan
from zeroresize.utils.state_checks import any_number, keyed


def plan_of(*pruned):
    return WorkloadPlan(tuple(RankPlan(pruned=share) for share in pruned))


class Prescribed:
    """Knows nothing of measuring: at its n-th update the last rank begins to prune half of its columns."""

    def __init__(self, num_ranks, at_update):
        self.migration = None
        self.what_if_plans, self.busy_s, self.outside_s = {}, (), ()
        self.calibration_plan, self.num_calibration_steps = None, 0
        self.updates, self.is_closed = [], False
        self._num_ranks, self._at_update = num_ranks, at_update

    @property
    def plan(self):
        share = 0.5 if len(self.updates) >= self._at_update else 0.0
        return plan_of(*[0.0] * (self._num_ranks - 1), share)

    def update(self, times, cost, wait_s, agreed):
        self.updates.append((times, cost, wait_s, agreed))

    def next_step(self):
        pass

    def state_dict(self):
        return {"num_updates": len(self.updates)}

    @property
    def state_check(self):
        return keyed({"num_updates": any_number})

    def load_state_dict(self, state):
        self.updates = [None] * state["num_updates"]

    def require_agreement(self, agreed):
        pass

    def require_loadable(self, problem):
        pass

    def close(self):
        self.is_closed = True


def test_a_balancer_carries_out_what_any_planner_decides(run_ranks, monkeypatch):
    def train(rank, group):
        monkeypatch.setattr(assembly, "GroupDecision", lambda *_: Prescribed(2, at_update=2))
        run = Run(group)
        seen = []
        for _ in range(3):
            run.steps(run.config.update_every)
            seen.append(run.balancer.metrics()["balance/ratio"])
        state = run.balancer.state_dict()
        resumed = Run(group)
        resumed.balancer.load_state_dict(state)
        resumed_ratio = resumed.balancer.metrics()["balance/ratio"]
        planner = run.balancer._parts.decision
        run.balancer.close()
        times = [own[0].busy_s for own in planner.updates]
        return seen, resumed_ratio, planner.is_closed, times

    for rank, (seen, resumed_ratio, is_closed, times) in enumerate(run_ranks(train, 2)):
        assert seen == ([0.0, 0.5, 0.5] if rank == 1 else [0.0] * 3)
        assert resumed_ratio == seen[-1]
        assert is_closed
        assert len(times) == 3 and min(times) > 0.0


MEMBERS = [name for name in (*Planner.__annotations__, *vars(Planner)) if not name.startswith("_")]


@pytest.mark.parametrize("member", MEMBERS)
def test_what_the_group_decides_by_is_a_planner(member):
    """mypy checks the types where the balancer takes it; this, that nothing is left out or asked for otherwise."""
    decision = GroupDecision(zr.BalanceConfig(mode="zero-pri"), 2, None)
    assert hasattr(decision, member)
    wanted = getattr(Planner, member, None)
    if inspect.isfunction(wanted):
        asked_for = list(inspect.signature(wanted).parameters)[1:]
        assert list(inspect.signature(getattr(decision, member)).parameters) == asked_for
