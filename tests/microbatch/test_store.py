"""Instruction stores: what is left there comes back, waits say why they last, and a store that is away is named."""

import logging
import random
import re
import threading
import time

import pytest
from helpers.redis_servers import RedisServer
from helpers.stores import KINDS, ON_ONE_KIND, StoreKeeper
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zeroresize.microbatch.embedded_store import EmbeddedStore
from zeroresize.microbatch.open_store import open_store
from zeroresize.microbatch.planners_report import PlannersReport
from zeroresize.microbatch.redis_store import RedisStore
from zeroresize.microbatch.store import PlanningError, StoreError


def later(call, after_s=0.2):
    """``call`` in a thread, after some seconds."""
    thread = threading.Timer(after_s, call)
    thread.start()
    return thread


def random_text(num_bytes):
    """Text that compresses badly."""
    return random.Random(0).randbytes(num_bytes // 2).hex()


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(plans=st.dictionaries(st.integers(0, 10**9), st.text(), min_size=1, max_size=5))
def test_plans_come_back_as_they_were_wherever_the_store_is_opened(keeper, plans):
    another = keeper.another()
    for iteration, text in plans.items():
        keeper.store.put(iteration, text)
    for _ in range(2):  # several ranks fetch the same plan
        assert {iteration: another.get(iteration, 1.0) for iteration in plans} == plans
    assert another.iterations() == sorted(plans)
    another.forget(10**9 + 1)
    assert keeper.store.iterations() == []
    keeper.store.forget(0)
    another.close()


def test_a_plan_is_replaced_by_a_later_one(store):
    store.put(3, "first")
    store.put(3, "second")
    assert store.get(3, 1.0) == "second"


def test_a_plan_is_waited_for_until_it_comes(keeper):
    other = keeper.another()
    began = time.monotonic()
    thread = later(lambda: other.put(7, "plan"), 0.3)
    assert keeper.store.get(7, 10.0) == "plan"
    assert 0.25 < time.monotonic() - began < 2.0
    thread.join()


def test_large_plans_travel(store):
    text = random_text(6_000_000)
    store.put(0, text)
    assert store.get(0, 5.0) == text


def test_a_plan_that_the_embedded_store_cannot_take_is_named_and_the_store_lives_on():
    store = EmbeddedStore()
    with pytest.raises(StoreError, match=r"leave the plan of iteration 4: it takes \d+ bytes at most, and this has"):
        store.put(4, random_text(20_000_000))
    store.put(4, "plan")
    assert store.get(4, 1.0) == "plan"


def test_forgotten_plans_are_gone_and_memory_stays_bounded(store):
    for iteration in range(300):
        store.put(iteration, random_text(2000))
        store.forget(iteration - 5)
        assert store.iterations() == list(range(max(0, iteration - 5), iteration + 1))
    assert len(store._names("count")) == 6 + 1  # and how far executors are
    assert store.progress() == 294


def test_a_plan_that_comes_after_it_was_forgotten_is_not_kept(store):
    store.forget(5)
    store.put(4, "late")
    store.put(5, "wanted")
    assert store.iterations() == [5]
    with pytest.raises(ValueError, match="iteration 4 is wanted, but plans before iteration 5 were dropped"):
        store.get(4, 5.0)


def test_whoever_waits_tells_planners_what_is_wanted(keeper):
    other = keeper.another()
    seen = []

    def plan_what_is_wanted():
        while not seen:
            wanted = other.progress()
            if wanted is not None:
                seen.append(wanted)
        other.put(wanted, "plan")

    thread = later(plan_what_is_wanted, 0.0)
    assert keeper.store.get(41, 10.0) == "plan"
    thread.join()
    assert seen == [41]


@pytest.mark.parametrize("prefix", ["", "iteration 2: "])
@pytest.mark.parametrize(("kind", "error"), [("ValueError", ValueError), ("KeyError", PlanningError)])
def test_an_error_comes_in_place_of_a_plan_and_names_the_iteration_once(keeper, kind, error, prefix):
    thread = later(lambda: keeper.another().fail(2, kind, f"{prefix}sample 17 has 9 tokens: at most 8 fit"))
    with pytest.raises(error, match=r"^iteration 2 cannot be planned: sample 17 has 9 tokens: at most 8 fit$"):
        keeper.store.get(2, 10.0)
    thread.join()
    assert keeper.store.iterations() == [2]


@ON_ONE_KIND
def test_a_late_plan_is_waited_for_with_messages_that_say_why(store, caplog):
    store.warn_after_s = 0.5
    store.report(PlannersReport(0, 2, 0, None, 3, under_way={6: 12.25, 8: 0.5}))
    store.report(PlannersReport(1, 2, 0, None, 3))
    thread = later(lambda: store.put(6, "plan"), 1.3)
    with caplog.at_level(logging.WARNING):
        assert store.get(6, 20.0) == "plan"
    thread.join()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2, texts  # after 0.5 and 1 s
    assert re.fullmatch(
        rf"the plan of iteration 6 has been waited for since 0\.\d s, at {store.shown_address}: the planners of host 0 "
        r"\(3\) plan iteration 6 for 12\.2 s, iteration 8 for 0\.5 s; the planners of host 1 \(3\) plan nothing\. "
        "Training goes on when it comes, or fails after 20 s",
        texts[0],
    )


@ON_ONE_KIND
def test_a_rank_that_need_not_warn_does_not(store, caplog):
    store.warn_after_s = 0.1
    thread = later(lambda: store.put(6, "plan"), 0.4)
    assert store.get(6, 20.0, warns=False) == "plan"
    thread.join()
    assert not caplog.records


@ON_ONE_KIND
def test_a_plan_that_does_not_come_is_an_error_that_says_what_planners_do(store):
    with pytest.raises(
        PlanningError, match=r"no plan of iteration 6 came to .* within 0.6 s: no planners have said any"
    ):
        store.get(6, 0.6)
    store.report(PlannersReport(0, 1, 0, None, 3, under_way={6: 12.25}))
    with pytest.raises(PlanningError, match=r"within 0.6 s: the planners of host 0 \(3\) plan iteration 6 for 12.2 s"):
        store.get(6, 0.6)


@ON_ONE_KIND
@pytest.mark.parametrize(
    ("report", "error", "text"),
    [
        (PlannersReport(1, 2, 0, None, 1, error="no such file"), PlanningError, "host 1 cannot plan: no such file"),
        (PlannersReport(1, 2, 0, None, 1, has_ended=True), PlanningError, "host 1 have ended"),
        (PlannersReport(0, 2, 0, 6, 1), ValueError, "iteration 7 is wanted, but planners plan up to iteration 6"),
    ],
    ids=["broken", "ended", "beyond"],
)
def test_a_plan_that_cannot_come_is_not_waited_for(store, report, error, text):
    began = time.monotonic()
    store.report(report)
    with pytest.raises(error, match=text):
        store.get(7, 30.0)
    assert time.monotonic() - began < 3.0


@pytest.mark.slow
@ON_ONE_KIND
def test_planners_of_another_host_do_not_matter(store):
    store.report(PlannersReport(1, 2, 0, None, 1, has_ended=True))
    thread = later(lambda: store.put(6, "plan"), 1.2)
    assert store.get(6, 30.0) == "plan"
    thread.join()


def test_what_ended_planners_have_left_is_still_fetched(store):
    store.put(7, "plan")
    store.report(PlannersReport(0, 1, 0, None, 1, has_ended=True))
    assert store.get(7, 30.0) == "plan"


@pytest.mark.slow
@ON_ONE_KIND
def test_planners_without_a_sign_of_life_count_as_dead(store):
    store.silent_s = 0.6
    store.report(PlannersReport(0, 1, 0, None, 1))
    ended = threading.Event()

    def beat():
        for number in range(100):
            if ended.wait(0.1):
                return
            store.report(PlannersReport(0, 1, 0, None, 1, beat=number))

    thread = later(beat, 0.0)
    with pytest.raises(PlanningError, match="no plan of iteration 7 came"):
        store.get(7, 1.3)
    ended.set()
    thread.join()
    with pytest.raises(PlanningError, match="planners of host 0 have given no sign of life for 1 s"):
        store.get(7, 30.0)


def test_waits_end_when_the_store_dies(keeper):
    reader = keeper.another()
    assert reader.iterations() == []
    thread = later(keeper.kill, 0.3)
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        reader.get(12, 60.0)
    thread.join()
    assert time.monotonic() - began < 4.0
    assert f"the instruction store at {reader.shown_address} was asked to fetch the plan of iteration 12: " in str(
        caught.value
    )
    with pytest.raises(StoreError, match="leave the plan of iteration 3"):
        reader.put(3, "plan")


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_stands_still_is_an_error_and_not_a_hang(kind, tmp_path):
    keeper = StoreKeeper(kind, tmp_path, answer_s=0.5)
    try:
        keeper.stop()
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"was asked to fetch the plan of iteration 1: .*"):
            keeper.store.get(1, 60.0)
        assert time.monotonic() - began < 3.0
        keeper.go_on()
    finally:
        keeper.end()


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_is_not_there_is_named(kind, tmp_path):
    keeper = StoreKeeper(kind, tmp_path)
    address = keeper.store.address
    keeper.kill()
    with pytest.raises(
        StoreError, match=f"the instruction store at {keeper.store.shown_address} was asked to open it: "
    ):
        open_store(address, answer_s=0.5)


@pytest.mark.parametrize(
    "address", ["memcached://here:11211", "127.0.0.1:6379", "tcp://nobody", "redis://here:port", "tcp://a:99999"]
)
def test_addresses_of_other_kinds_are_refused(address):
    with pytest.raises(ValueError, match=r"is not allowed as the address|is tcp://host:port"):
        open_store(address)


def test_runs_on_one_server_do_not_meet_and_leave_nothing(tmp_path):
    server = RedisServer(tmp_path)
    try:
        runs = [RedisStore(server.url) for _ in range(2)]
        for number, run in enumerate(runs):
            run.put(0, f"run {number}")
        assert [run.get(0, 1.0) for run in runs] == ["run 0", "run 1"]
        joined = open_store(runs[0].address)
        joined.close()
        assert runs[0].get(0, 1.0) == "run 0"
        assert 0 < runs[0]._client.ttl(runs[0]._key) <= 7 * 24 * 3600
        runs[0].close()
        assert runs[1].iterations() == [0]
        assert runs[1]._client.keys("*") == [runs[1]._key.encode()]
        runs[1].close()
    finally:
        server.kill()


def test_a_server_with_a_password_by_its_port(tmp_path):
    server = RedisServer(tmp_path, on_port=True, password="secret")
    try:
        with pytest.raises(StoreError, match=r"was asked to open it: .*uthenticat"):
            RedisStore(server.url)
        store = RedisStore(server.url.replace("redis://", "redis://:secret@"))
        joined = open_store(store.address)
        joined.put(0, "plan")
        assert store.get(0, 1.0) == "plan"
        assert "secret" not in joined.shown_address and joined.shown_address.startswith(server.url)
        server.kill()
        with pytest.raises(StoreError) as caught:
            store.get(1, 10.0)
        assert "secret" not in str(caught.value)
    finally:
        server.kill()


def test_a_server_that_is_full_says_so(tmp_path):
    server = RedisServer(tmp_path)
    try:
        store = RedisStore(server.url)
        store._client.config_set("maxmemory", "1mb")
        with pytest.raises(StoreError, match=r"leave the plan of iteration 0: .*maxmemory"):
            store.put(0, random_text(4_000_000))
    finally:
        server.kill()
