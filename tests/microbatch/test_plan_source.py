"""Every rank gets the plan of its iteration, or all ranks get an error: none goes on alone, and none hangs."""

import os
import socket
import time

import pytest
import torch
from helpers.planning import ReadyProcesses
from helpers.processes import told_by_survivors
from helpers.stores import StoreKeeper

from zeroresize.microbatch import planners as planners_module
from zeroresize.microbatch import shared_store
from zeroresize.microbatch.embedded_store import EmbeddedStore
from zeroresize.microbatch.open_store import open_store
from zeroresize.microbatch.plan_source import PlanSource
from zeroresize.microbatch.planners import Planners
from zeroresize.microbatch.shared_store import share_store
from zeroresize.microbatch.store import StoreError
from zeroresize.policy.microbatches.iteration_plan import IterationPlan, ReplicaPlan
from zeroresize.policy.microbatches.micro_batch import MicroBatch
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


def error_of(call):
    """The name of the class and the text of what is raised, within 10 s."""
    began = time.monotonic()
    with pytest.raises(Exception) as caught:
        call()
    assert time.monotonic() - began < 10.0
    return type(caught.value).__name__, str(caught.value)


def test_all_ranks_get_the_same_plans_of_planners(run_ranks, keeper, monkeypatch):
    def train(rank, group):
        monkeypatch.setattr(planners_module, "start_process", ReadyProcesses(1 - rank).start)
        store = keeper.another()
        planners = Planners(plan_text, store, first=1, num_workers=2) if rank == 0 else None
        source = PlanSource(store, group, CPU, model="model")
        for iteration in (1, 2):
            assert source.plan(iteration, f"batch {iteration}") == plan_of(iteration)
        assert rank or store.iterations()[0] == 2  # until rank 0 asks for the next
        error = error_of(lambda: source.plan(3, "batch 3"))
        assert source.plan(4, "batch 4") == plan_of(4)
        if planners is not None:
            planners.close()
        return error

    text = "iteration 3 cannot be planned: sample 1 has 9 tokens: at most 8 fit"
    assert run_ranks(train, 2) == [("ValueError", text)] * 2


@pytest.fixture
def first_store():
    """A store that is kept here, with the plans of two iterations."""
    store = EmbeddedStore()
    for iteration in (1, 2):
        store.put(iteration, plan_of(iteration).to_json())
    yield store
    store.close()


def fail_on_rank_1(first_store, run_ranks, fetch):
    """The errors of both ranks for iteration 1, which only rank 1 cannot get; iteration 2 comes to both."""

    def train(rank, group):
        store = open_store(first_store.address)
        source = PlanSource(store, group, CPU, model="model")
        error = error_of(lambda: source.plan(1, "batch 1") if rank == 0 else fetch(source, store))
        if rank == 1:
            source._store = open_store(first_store.address)
        assert source.plan(2, "batch 2") == plan_of(2)
        return error

    errors = run_ranks(train, 2)
    assert errors[0] == (
        "CannotMoveError",
        "nothing has moved or changed: ranks [1] of the group failed before; their errors tell why",
    )
    return errors[1]


def test_a_plan_of_other_samples_is_refused_on_all_ranks(run_ranks, first_store):
    name, text = fail_on_rank_1(first_store, run_ranks, lambda source, store: source.plan(1, "another batch"))
    assert name == "ValueError"
    assert text.startswith(
        "the plan of iteration 1 was made for other samples: the fingerprint of their lengths is batc"
    )
    assert "that of this rank's another batch" in text


def test_a_rank_that_has_lost_the_store_stops_all_ranks(run_ranks, first_store):
    def lose(source, store):
        store.close()
        source.plan(1, "batch 1")

    name, text = fail_on_rank_1(first_store, run_ranks, lose)
    assert name == "CannotMoveError"
    assert f"the instruction store at {first_store.address} was asked to fetch the plan of iteration 1: it is" in text


def test_plans_of_another_model_and_of_nothing_are_refused(run_ranks, first_store):
    first_store.put(3, plan_of(4).to_json())
    first_store.put(4, "{}")

    def train(rank, group):
        source = PlanSource(open_store(first_store.address), group, CPU, model="mine")
        return [error_of(lambda n=n: source.plan(n, "batch")) for n in (1, 3, 4)]

    for errors in run_ranks(train, 2):
        assert [name for name, _ in errors] == ["ValueError"] * 3
        (_, model), (_, iteration), (_, nothing) = errors
        assert "iteration 1 was made for another model" in model and "is model, that of this rank mine" in model
        assert iteration == "the plan of iteration 3 is wanted, and this is one of 4"
        assert nothing.startswith("this is no plan of an iteration")


def test_ranks_with_different_plans_do_not_go_on(run_ranks):
    def train(rank, group):
        store = EmbeddedStore()
        store.put(1, plan_of(1).to_json() + " " * rank)
        return error_of(lambda: PlanSource(store, group, CPU, model="model").plan(1, "batch 1"))

    for name, text in run_ranks(train, 2):
        assert name == "RuntimeError" and "the ranks of the group differ in the plan of iteration 1" in text


def test_a_plan_that_does_not_come_ends_all_ranks(run_ranks, first_store):
    def train(rank, group):
        source = PlanSource(open_store(first_store.address), group, CPU, model="model", timeout_s=0.5)
        return error_of(lambda: source.plan(5, "batch 5"))

    for name, text in run_ranks(train, 2):
        assert name == "CannotMoveError" and "no plan of iteration 5 came to" in text


def test_a_rank_that_dies_is_named_by_the_others(tmp_path, first_store):
    def train(rank, group):
        source = PlanSource(open_store(first_store.address), group, CPU, model="model")
        source.plan(1, "batch 1")
        if rank == 1:
            os._exit(0)
        return str(error_of(lambda: source.plan(2, "batch 2")))

    texts = told_by_survivors(train, 3, tmp_path)
    assert sorted(texts) == [0, 2]
    for text in texts.values():
        assert "ranks [1] of the group (ranks [1] of the job) did not come" in text


def test_ranks_share_a_store_that_rank_0_keeps_and_hosts_are_numbered(run_ranks, monkeypatch):
    def share(rank, group):
        monkeypatch.setattr(socket, "gethostname", lambda: ["b", "a", "b"][rank])
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        shared = share_store(group)
        if rank == 1:
            shared.store.put(0, "plan")
        assert shared.store.get(0, 10.0) == "plan"
        shared.close()
        with pytest.raises(StoreError, match="it is closed here"):
            shared.store.iterations()
        return shared.host, shared.num_hosts, shared.is_first_of_host

    assert run_ranks(share, 3) == [(0, 2, True), (1, 2, True), (0, 2, False)]


def test_ranks_share_a_run_on_a_redis_server(run_ranks, tmp_path):
    keeper = StoreKeeper("redis", tmp_path)
    url = keeper.store.address.partition("#")[0]

    def share(rank, group):
        shared = share_store(group, url)
        if rank == 0:
            shared.store.put(0, "plan")
        assert shared.store.get(0, 10.0) == "plan"
        shared.close()
        return shared.store.address, shared.host, shared.num_hosts, shared.is_first_of_host

    try:
        (address, *first), (same, *second) = run_ranks(share, 2)
        assert address == same != keeper.store.address
        assert (first, second) == ([0, 1, True], [0, 1, False])
    finally:
        keeper.end()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_store_that_cannot_be_reached_is_an_error_on_all_ranks(run_ranks, monkeypatch, failing):
    def share(rank, group):
        def fail(address, **options):
            raise StoreError("the server is not there")

        if rank == failing:
            monkeypatch.setattr(shared_store, "open_store", fail)
        return error_of(lambda: share_store(group, "redis://nowhere" if failing == 0 else None))

    errors = run_ranks(share, 2)
    assert all("the server is not there" in text for _, text in errors), errors
    assert f"ranks [{failing}] of the group failed to share an instruction store" in errors[1 - failing][1]
