"""Every rank gets the plan of its iteration, or all ranks get an error: none goes on alone, and none hangs."""

import os
import threading
from collections.abc import Callable

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from helpers.planning import error_of, is_alive, wait_until
from helpers.processes import told_by_survivors

from zeroresize.microbatch.planners import RunPlanners
from zeroresize.microbatch.planning_process import IterationPlanner, plan_value
from zeroresize.microbatch.store import SharedStore, served_store, share_store
from zeroresize.policy.microbatches.plan import IterationPlan, MicroBatch, ReplicaPlan
from zeroresize.runtime.instructions import Instruction, Kind

CPU = torch.device("cpu")


def plan_of(iteration, model="model", batch=None):
    instructions = (Instruction(Kind.FORWARD, 0), Instruction(Kind.BACKWARD, 0))
    replica = ReplicaPlan((MicroBatch(((0,), (1,)), (7,)),), (instructions,), 1.5, (8.0,))
    return IterationPlan(iteration, model, batch or f"batch {iteration}", "none", (replica,))


def plan_text(iteration):
    if iteration == 3:
        raise ValueError("sample 1 has 9 tokens: at most 8 fit")
    return plan_of(iteration).to_json()


class Planner(IterationPlanner):
    """Plans as :func:`plan_text`."""

    def __init__(self, fingerprint: str = "model", text: Callable[[int], str] = plan_text) -> None:
        vars(self).update(fingerprint=fingerprint, text=text)

    def __call__(self, iteration):
        return self.text(iteration)


@pytest.mark.slow
def test_all_ranks_get_the_same_plans_of_planners_and_after_a_restart_other_ones(run_ranks, forked):
    def train(rank, group):
        store = share_store(group)
        planners = RunPlanners(Planner(), store, group, CPU, first=1, last=6, num_workers=2)
        assert (planners._planners is None) == (rank == 1)
        for iteration in (1, 2):
            assert planners.plan(iteration, f"batch {iteration}") == plan_of(iteration)
        errors = [error_of(lambda: planners.plan(3, "batch 3"))]
        assert planners.plan(4, "batch 4") == plan_of(4)
        errors += [error_of(lambda n=n: planners.plan(n, "")) for n in (3, 7)]
        assert bool(planners.seconds()) == (rank == 0)
        planners.restart(Planner("other", other_text), 4)
        for iteration in (4, 5):  # also of one that was planned before
            assert planners.plan(iteration, f"batch {iteration}") == plan_of(iteration, "other")
        unpicklable = error_of(lambda: planners.restart(Planner("other", lambda iteration: ""), 6))
        planners.close()
        store.close()
        return errors, unpicklable[1]

    (first, refused), (second, heard) = run_ranks(train, 2)
    assert "cannot be given to other processes" in refused and "ranks [0] of the group failed" in heard
    assert first == second
    assert first == [
        ("ValueError", "iteration 3 cannot be planned: sample 1 has 9 tokens: at most 8 fit"),
        (
            "ValueError",
            "the plan of iteration 3 is wanted, but plans before iteration 4 were dropped; where training is resumed, "
            "make new planners",
        ),
        ("ValueError", "the plan of iteration 7 is wanted, but planners plan up to 6"),
    ]


def other_text(iteration):
    return plan_of(iteration, "other").to_json()


def left_by_hand(keeper, group, **options):
    """What fetches plans that are left in a store by hand, for the first series, on this rank."""
    store = keeper.another(is_first_of_node=False)
    return RunPlanners(Planner(), store, group, CPU, **options)


def test_a_rank_that_cannot_get_its_plan_stops_all_ranks(run_ranks, keeper):
    """Rank 1 has other samples, then it loses the store; the next plan comes to both, then others' and nothing."""
    for iteration, text in enumerate([plan_of(n).to_json() for n in (0, 1, 2, 4)] + ["{}"]):
        keeper.store.put(1, iteration, plan_value(text))

    def train(rank, group):
        planners = left_by_hand(keeper, group)
        errors = [error_of(lambda: planners.plan(1, "another batch" if rank else "batch 1"))]
        store = planners._store
        if rank:
            planners._store = keeper.another()
            planners._store.close()
        errors.append(error_of(lambda: planners.plan(1, "batch 1")))
        planners._store = store
        assert planners.plan(2, "batch 2") == plan_of(2)
        planners.planner = Planner("mine")
        return errors, [error_of(lambda n=n: planners.plan(n, "batch")) for n in (2, 3, 4)]

    (others, first), (errors, second) = run_ranks(train, 2)
    (name, text), (lost_name, lost) = errors
    heard = f"ranks [1] of the group failed while preparing the plan of iteration 1: {text}"
    assert others == [("RuntimeError", heard), (lost_name, lost)]
    assert name == "ValueError" and "of their lengths is batch 1, that of this rank's another batch" in text
    assert lost_name == "RuntimeError" and "was asked to fetch the plan of iteration 1: it is closed here" in lost
    assert first == second and [name for name, _ in first] == ["ValueError"] * 3
    (_, model), (_, iteration), (_, nothing) = first
    assert "iteration 2 was made for another model" in model and "is model, that of this rank mine" in model
    assert iteration == "the plan of iteration 3 is wanted, and this is one of 4"
    assert nothing.startswith("this is no plan of an iteration")


@on_ranks(2)
def test_ranks_with_different_plans_and_those_whose_plan_does_not_come_do_not_go_on(rank, group):
    store = SharedStore(served_store(), "here", is_first_of_node=False)
    store.put(1, 1, plan_value(plan_of(1).to_json() + " " * rank))
    planners = RunPlanners(Planner(), store, group, CPU, timeout_s=0.5)
    for (name, text), (late_name, late) in gathered(
        group, [error_of(lambda n=n: planners.plan(n, f"batch {n}")) for n in (1, 5)]
    ):
        assert name == "RuntimeError" and "the ranks of the group differ in the plan of iteration 1" in text
        assert late_name == "RuntimeError" and "no plan of iteration 5 came to here within 0.5 s" in late


def test_the_rank_that_keeps_plans_dies_and_the_others_raise(tmp_path, forked):
    """Its planners end with it."""

    def train(rank, group):
        store = share_store(group)
        planners = RunPlanners(Planner(text=only_the_first), store, group, CPU)
        planners.plan(0, "batch 0")
        if rank == 0:
            (worker,) = planners._planners._workers
            (tmp_path / "process").write_text(str(worker._processes[0].pid))
            os.kill(os.getpid(), 9)
        return str(error_of(lambda: planners.plan(1, "batch 1")))

    texts = told_by_survivors(train, 3, tmp_path)
    assert sorted(texts) == [1, 2] and all("the instruction store at 127.0.0.1" in text for text in texts.values())
    process = int((tmp_path / "process").read_text())
    wait_until(lambda: not is_alive(process), 3.0)


def never(iteration):
    threading.Event().wait()


def only_the_first(iteration):
    return never(iteration) if iteration else plan_text(iteration)
