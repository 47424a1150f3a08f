"""The instruction store: what is left there comes back, waits say why they last, and a store that is away is named."""

import logging
import multiprocessing
import os
import random
import re
import socket
import threading
import time

import pytest
import torch.distributed as dist
from helpers.planning import error_of
from helpers.processes import for_each
from helpers.stores import StoreKeeper
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zeroresize.microbatch import store as store_module
from zeroresize.microbatch.planning_process import MOST_BYTES, PlanningError, failure_value, plan_value
from zeroresize.microbatch.store import StoreError, share_store


def fetched(store, iteration, timeout_s=10.0, warns=True):
    return store.get(1, iteration, timeout_s, lambda: "planners plan nothing", warns=warns)


def later(call, after_s=0.2):
    """``call`` in a thread, after some seconds."""
    thread = threading.Timer(after_s, call)
    thread.start()
    return thread


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(plans=st.dictionaries(st.integers(0, 10**9), st.text(), min_size=1, max_size=5))
def test_plans_come_back_as_they_were_wherever_the_store_is_opened(keeper, plans):
    another = keeper.another()
    for iteration, text in plans.items():
        keeper.store.put(1, iteration, plan_value(text))
    for _ in range(2):  # several ranks fetch the same plan
        assert {iteration: fetched(another, iteration) for iteration in plans} == plans
    another.drop((1, iteration) for iteration in plans)
    for iteration in plans:
        with pytest.raises(PlanningError, match=f"no plan of iteration {iteration} came"):
            fetched(keeper.store, iteration, 0.0)


def test_values_as_large_as_may_be_travel(store):
    value = random.Random(0).randbytes(MOST_BYTES)
    store.put(1, 0, value)
    assert store._store.get("plan/1/0") == value


def test_an_error_comes_in_place_of_a_plan_and_names_the_iteration_once(store):
    for kind, error in (("ValueError", ValueError), ("KeyError", PlanningError)):
        for prefix in ("", "iteration 2: "):
            store.put(1, 2, failure_value(kind, f"{prefix}sample 17 has 9 tokens: at most 8 fit"))
            with pytest.raises(error, match=r"^iteration 2 cannot be planned: sample 17 has 9 tokens: at most 8 fit$"):
                fetched(store, 2)


def test_a_late_plan_is_waited_for_with_messages_that_say_why(keeper, caplog):
    store = keeper.store
    store.warn_after_s = 0.5
    keeper.another().put(2, 6, plan_value("of another series"))
    thread = later(lambda: store.put(1, 6, plan_value("plan")), 1.3)
    with caplog.at_level(logging.WARNING):
        assert fetched(store, 6, 20.0) == "plan"
    thread.join()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2, texts  # after 0.5 and 1 s
    with pytest.raises(PlanningError, match=r"no plan of iteration 7 came to .* within 0.6 s: planners plan nothing"):
        fetched(store, 7, 0.6, warns=False)
    assert len(caplog.records) == 2
    assert re.fullmatch(
        rf"the plan of iteration 6 has been waited for since \d+ ms, at 127.0.0.1:{keeper.port}: planners plan "
        r"nothing\. Training goes on when it comes, or fails after 20 s",
        texts[0],
    )


def test_waits_end_when_the_store_dies(keeper):
    reader = keeper.another()
    thread = later(keeper.kill, 0.3)
    began = time.monotonic()
    with pytest.raises(StoreError, match=f"at 127.0.0.1:{keeper.port} was asked to fetch the plan of iteration 12: "):
        fetched(reader, 12, 60.0)
    thread.join()
    assert time.monotonic() - began < 4.0
    with pytest.raises(StoreError, match="leave the plan of iteration 3"):
        reader.put(1, 3, b"")


def test_a_store_that_stands_still_is_an_error_and_not_a_hang():
    keeper = StoreKeeper(answer_s=0.5)
    try:
        keeper.stop()
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"was asked to fetch the plan of iteration 1: no answer within 0.5 s"):
            fetched(keeper.store, 1, 60.0)
        assert time.monotonic() - began < 3.0
        keeper.go_on()
    finally:
        keeper.end()


def test_nobody_but_this_host_reaches_a_store_on_loopback(keeper):
    with pytest.raises(ConnectionRefusedError):  # another address of this node, as its network's would be
        socket.create_connection(("127.0.0.2", keeper.port), 1.0)


def test_ranks_share_a_store_that_rank_0_keeps_and_hosts_are_numbered(run_ranks, monkeypatch, caplog):
    def share(rank, group):
        monkeypatch.setattr(socket, "gethostname", lambda: ["b", "a", "b"][rank])
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        shared = share_store(group)
        if rank == 1:
            shared.put(1, 0, plan_value("plan"))
        assert fetched(shared, 0) == "plan"
        shared.close()
        with pytest.raises(StoreError, match="it is closed here"):
            fetched(shared, 0)
        trusted = [text for record in caplog.records if "is trusted" in (text := record.getMessage())]
        return shared.node, shared.num_nodes, shared.is_first_of_node, trusted

    caplog.set_level(logging.WARNING)
    (*first, trusted), *others = run_ranks(share, 3)
    assert first == [0, 2, True] and others == [(1, 2, True, []), (0, 2, False, [])]
    assert re.fullmatch(r"plans come by localhost:\d+, which asks nobody who they are: all in .* trusted", *trusted)


@pytest.mark.parametrize("last", [0, 1])
def test_a_run_ends_without_an_error_whichever_rank_closes_last(last, forked):
    """Rank 0 keeps the job's store and exits at once, while the other one, which is slow, still reads there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    def end(rank, failures):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        store, get = share_store(dist.group.WORLD), dist.PrefixStore.get
        if rank:
            dist.PrefixStore.get = lambda *arguments: time.sleep(0.3) or get(*arguments)
        time.sleep(0.3 if rank == last else 0.0)
        try:
            store.close()
        except BaseException as error:
            failures.put(str(error))
            failures.close()
            failures.join_thread()
        os._exit(0)

    fork = multiprocessing.get_context("fork")
    failures = fork.Queue()
    ranks = [fork.Process(target=end, args=(rank, failures)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(20.0)
        assert process.exitcode == 0
    assert failures.empty(), failures.get()


def test_a_store_that_cannot_be_made_or_opened_is_an_error_on_all_ranks(run_ranks, monkeypatch):
    @for_each([("served_store", 0, "too many open files"), ("TCPStore", 1, "nobody is there")])
    def share(rank, group, name, where, text):
        def fail(*_, **__):
            raise OSError(text)

        with monkeypatch.context() as patched:
            if rank == where:
                patched.setattr(store_module, name, fail)
            return error_of(lambda: share_store(group))[1]

    for errors in run_ranks(share, 2):
        assert "too many open files" in errors[0] and "nobody is there" in errors[1]
