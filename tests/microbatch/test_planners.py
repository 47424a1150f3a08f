"""Planners: all plans come, in order and once, whatever happens to the processes that make them."""

import itertools
import json
import logging
import multiprocessing
import os
import signal
import threading
import time

import pytest
from helpers.planning import (
    ReadyProcesses,
    RecordedPlan,
    Unloadable,
    drawn_text,
    is_alive,
    limits_text,
    text_of,
    wait_until,
)
from helpers.stores import ON_ONE_KIND

from zeroresize.microbatch import planners as planners_module
from zeroresize.microbatch.planners import Planners
from zeroresize.microbatch.planning_task import PlanningTask
from zeroresize.microbatch.store import PlanningError, StoreError


@pytest.fixture
def folder(tmp_path):
    """Where planners leave what they did."""
    path = tmp_path / "planned"
    path.mkdir()
    return path


def fetched(store, iterations, timeout_s=20.0):
    """What executors get of these iterations, one after another."""
    texts = []
    for iteration in iterations:
        store.forget(iteration)
        texts.append(store.get(iteration, timeout_s))
    return texts


@pytest.mark.parametrize(("first", "num_workers"), [(0, 3), (17, 1)], ids=["from the first", "resumed"])
def test_every_plan_comes_once(forked, store, folder, first, num_workers):
    plan = RecordedPlan(folder)
    iterations = range(first, first + 40)
    with Planners(plan, store, first=first, last=first + 39, num_workers=num_workers) as planners:
        assert fetched(store, iterations) == [text_of(iteration) for iteration in iterations]
        wait_until(lambda: len(planners.seconds()) == 40)
        assert all(0.0 < seconds < 1.0 for seconds in planners.seconds().values())
        assert sorted(planners.seconds()) == plan.begun() == list(iterations)
        with pytest.raises(ValueError, match=f"iteration {first + 40} is wanted, but planners plan up to iteration"):
            store.get(first + 40, 20.0)
    assert all(len(plan.process_ids(iteration)) == 1 for iteration in iterations)
    assert len({plan.process_ids(iteration)[0] for iteration in iterations}) <= num_workers


@ON_ONE_KIND
def test_planners_stay_as_far_ahead_as_they_are_told(forked, store, folder):
    plan = RecordedPlan(folder)
    with Planners(plan, store, first=2, num_workers=2, ahead=3):
        wait_until(lambda: store.iterations() == [2, 3, 4, 5])
        time.sleep(0.3)
        assert plan.begun() == [2, 3, 4, 5]
        store.forget(4)
        wait_until(lambda: store.iterations() == [4, 5, 6, 7])
        time.sleep(0.3)
        assert plan.begun() == [2, 3, 4, 5, 6, 7]
        assert store.get(20, 10.0) == text_of(20)  # whoever is further is followed
        wait_until(lambda: store.iterations()[-1] == 23)
    assert plan.begun() == [2, 3, 4, 5, 6, 7, 20, 21, 22, 23]


@ON_ONE_KIND
def test_which_process_plans_what_changes_nothing(forked, store):
    texts = []
    for num_workers in (1, 3):
        with Planners(drawn_text, store, first=0, last=11, num_workers=num_workers, ahead=12):
            texts.append(fetched(store, range(12)))
        store.forget(100)
        store.forget(0)
    assert texts[0] == texts[1] and len(set(texts[0])) == 12


def test_hosts_share_the_iterations(forked, keeper, folder):
    plan = RecordedPlan(folder)
    with (
        Planners(plan, keeper.store, first=3, last=22, host=0, num_hosts=2, ahead=4) as even,
        Planners(plan, keeper.another(), first=3, last=22, host=1, num_hosts=2, ahead=4) as odd,
    ):
        assert fetched(keeper.another(), range(3, 23)) == [text_of(iteration) for iteration in range(3, 23)]
        wait_until(lambda: len(even.seconds()) + len(odd.seconds()) == 20)
        assert list(even.seconds()) == list(range(4, 23, 2)) and list(odd.seconds()) == list(range(3, 23, 2))


@pytest.mark.slow
@ON_ONE_KIND
def test_a_late_plan_is_waited_for_with_a_message(forked, store, folder, caplog):
    plan = RecordedPlan(folder, slow=(1,))
    store.warn_after_s = 0.4
    with Planners(plan, store, first=0), caplog.at_level(logging.WARNING):
        store.get(0, 10.0)
        timer = threading.Timer(0.7, plan.go)
        timer.start()
        assert store.get(1, 20.0) == text_of(1)
        timer.join()
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("the plan of iteration 1 has been waited for since 0.")
    assert "the planners of host 0 (1) plan iteration " in text


def test_a_planner_that_is_killed_is_replaced_and_its_iteration_planned_again(forked, store, folder, caplog):
    plan = RecordedPlan(folder, slow=(2,))
    with Planners(plan, store, first=0, last=9, num_workers=2) as planners, caplog.at_level(logging.WARNING):
        wait_until(lambda: plan.process_ids(2))
        os.kill(plan.process_ids(2)[0], signal.SIGKILL)
        wait_until(lambda: len(plan.process_ids(2)) == 2)
        plan.go()
        assert fetched(store, range(10)) == [text_of(iteration) for iteration in range(10)]
        wait_until(lambda: len(planners.seconds()) == 10)
    first, second = plan.process_ids(2)
    assert first != second
    assert [record.getMessage() for record in caplog.records] == [
        "a planner of host 0 ended by SIGKILL, as where memory runs out while it planned iteration 2: another takes "
        "its place, and plans it again"
    ]


@ON_ONE_KIND
def test_an_iteration_that_kills_its_planners_is_an_error_and_the_others_come(forked, store, folder):
    plan = RecordedPlan(folder, deadly=(2,))
    with Planners(plan, store, first=0, last=5):
        with pytest.raises(PlanningError, match="iteration 2 cannot be planned: 3 planners have died of it, the last"):
            store.get(2, 20.0)
        assert len(plan.process_ids(2)) == 3
        assert store.get(5, 10.0) == text_of(5)


def test_errors_of_planning_reach_who_waits(forked, store, folder):
    plan = RecordedPlan(folder, invalid=(1,), broken=(2,))
    with Planners(plan, store, first=0):
        assert store.get(0, 10.0) == text_of(0)
        with pytest.raises(ValueError, match=r"^iteration 1 cannot be planned: sample 3 has 17 tokens.*16 fit$"):
            store.get(1, 10.0)
        with pytest.raises(PlanningError, match=r"(?s)^iteration 2 cannot be planned: KeyError.*in __call__"):
            store.get(2, 10.0)
        assert store.get(3, 10.0) == text_of(3)
        time.sleep(0.3)
        assert len(plan.process_ids(1)) == 1  # it would fail again


@ON_ONE_KIND
def test_something_else_than_text_is_an_error(forked, store):
    with Planners(len_of_nothing, store, first=0), pytest.raises(PlanningError, match="returned int: text is needed"):
        store.get(0, 10.0)


def len_of_nothing(iteration):
    return 0


def test_a_plan_that_the_store_has_lost_is_made_again(forked, store, folder):
    plan = RecordedPlan(folder)
    with Planners(plan, store, first=0, ahead=3):
        wait_until(lambda: store.iterations() == [0, 1, 2, 3])
        store._delete(["plan/1", "progress"], "lose it")
        assert store.get(1, 10.0) == text_of(1)


def test_planners_that_are_closed_end_at_once_and_who_waits_hears_of_it(forked, keeper, folder):
    plan = RecordedPlan(folder, slow=(0, 1))
    planners = Planners(plan, keeper.store, first=0, num_workers=2)
    wait_until(lambda: plan.begun() == [0, 1])
    timer = threading.Timer(0.3, planners.close)
    timer.start()
    with pytest.raises(PlanningError, match="iteration 0 cannot be planned: the planners of host 0 have ended"):
        keeper.another().get(0, 30.0)
    began = time.monotonic()
    timer.join()
    assert time.monotonic() - began < 1.5
    processes = [planners.process_id, *plan.process_ids(0), *plan.process_ids(1)]
    assert not any(map(is_alive, processes))
    planners.close()


@ON_ONE_KIND
def test_planners_that_nobody_has_any_more_end(forked, store, folder):
    plan = RecordedPlan(folder, slow=(0,))
    planners = Planners(plan, store, first=0)
    wait_until(lambda: plan.begun() == [0])
    processes = [planners.process_id, *plan.process_ids(0)]
    del planners
    wait_until(lambda: not any(map(is_alive, processes)), 3.0)


def test_nothing_is_left_when_the_training_process_dies(keeper, folder, monkeypatch):
    plan = RecordedPlan(folder, slow=(0, 1))

    def train():
        monkeypatch.setattr(planners_module, "start_process", ReadyProcesses(2).start)
        planners = [Planners(plan, keeper.another(), first=0, host=host, num_hosts=2) for host in range(2)]
        wait_until(lambda: plan.begun() == [0, 1])
        (folder / "processes").write_text(" ".join(str(each.process_id) for each in planners))
        os.kill(os.getpid(), signal.SIGKILL)

    training = multiprocessing.get_context("fork").Process(target=train)
    training.start()
    training.join(20.0)
    assert training.exitcode == -signal.SIGKILL
    processes = [*map(int, (folder / "processes").read_text().split()), *plan.process_ids(0), *plan.process_ids(1)]
    assert len(processes) == 4
    wait_until(lambda: not any(map(is_alive, processes)), 3.0)
    with pytest.raises(PlanningError, match="the planners of host 1 have ended"):
        keeper.store.get(1, 10.0)


def test_planners_whose_process_is_killed_end_at_once_and_another_goes_on(forked, store, folder, caplog):
    plan = RecordedPlan(folder, slow=(1,))
    with Planners(plan, store, first=0) as planners, caplog.at_level(logging.WARNING):
        wait_until(lambda: plan.begun() == [0, 1])
        (planner,) = plan.process_ids(1)
        os.kill(planners.process_id, signal.SIGKILL)
        wait_until(lambda: not is_alive(planner), 1.0)
        plan.go()
        assert fetched(store, range(6)) == [text_of(iteration) for iteration in range(6)]
    assert len(plan.process_ids(0)) == 1 and len(plan.process_ids(1)) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "the process of the planners of host 0 has ended with code -9: it is started again in 0.5 s"
    ]


def test_a_store_that_dies_is_named_and_planners_try_again_until_they_are_closed(forked, keeper, folder, caplog):
    plan = RecordedPlan(folder)
    with Planners(plan, keeper.store, first=0, ahead=2) as planners, caplog.at_level(logging.WARNING):
        reader = keeper.another()
        assert reader.get(0, 10.0) == text_of(0)
        process = planners.process_id
        keeper.kill()
        with pytest.raises(StoreError, match=f"the instruction store at {reader.shown_address} was asked to fetch the"):
            reader.get(7, 30.0)
        wait_until(lambda: not is_alive(process))
        wait_until(lambda: any("is started again in 0.5 s" in record.getMessage() for record in caplog.records))
        began = time.monotonic()
    assert time.monotonic() - began < 2.5
    assert f"the planners of host 0 stop: the instruction store at {reader.shown_address} was asked " in caplog.text


@ON_ONE_KIND
def test_what_processes_cannot_load_is_an_error_on_both_sides(forked, store, caplog):
    with Planners(Unloadable(), store, first=0):
        with pytest.raises(PlanningError, match=r"cannot load the function that plans .OSError: the file of lengths"):
            store.get(0, 20.0)
        wait_until(lambda: "the planners of host 0 cannot plan: processes cannot load the function" in caplog.text)


@pytest.mark.parametrize("keeper", ["embedded"], indirect=True)
@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"plan": lambda iteration: ""}, "cannot be given to other processes"),
        ({"first": -1}, "first=-1 is not allowed"),
        ({"first": 3, "last": 2}, "last=2 is not allowed"),
        ({"num_workers": 0}, "num_workers=0 is not allowed"),
        ({"ahead": 0}, "ahead=0 is not allowed"),
        ({"host": 2, "num_hosts": 2}, "host=2 is not allowed"),
    ],
    ids=["plan", "first", "last", "num_workers", "ahead", "host"],
)
def test_what_cannot_be_planned_is_refused_before_anything_starts(store, monkeypatch, values, text):
    monkeypatch.setattr(planners_module, "start_process", lambda: pytest.fail("something starts"))
    with pytest.raises(ValueError, match=text):
        Planners(**{"plan": text_of, "store": store, "first": 0, **values})


@pytest.mark.parametrize("num_hosts", [1, 2, 3])
@pytest.mark.parametrize(("first", "last", "progress"), [(0, None, None), (5, 12, 9), (5, 12, 3), (5, 12, 40)])
def test_hosts_together_want_every_iteration_of_the_window(num_hosts, first, last, progress):
    tasks = [PlanningTask("", first, last, 1, 4, host, num_hosts) for host in range(num_hosts)]
    begin = max(first, progress or 0)
    window = [number for number in range(begin, begin + 5) if last is None or number <= last]
    wanted = [list(task.wanted(progress)) for task in tasks]
    assert sorted(itertools.chain(*wanted)) == window
    assert all(number % num_hosts == host for host, numbers in enumerate(wanted) for number in numbers)


@pytest.mark.parametrize("keeper", ["embedded"], indirect=True)
@pytest.mark.slow
def test_processes_of_their_own_plan_and_are_started_again_when_they_are_killed(keeper, caplog):
    store = keeper.store
    with Planners(limits_text, store, first=0, ahead=1) as planners, caplog.at_level(logging.WARNING):
        limits = json.loads(store.get(0, 60.0))
        assert limits == {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        process = planners.process_id
        os.kill(process, signal.SIGKILL)
        store.forget(5)
        assert store.get(6, 60.0) == json.dumps(limits)
        assert planners.process_id != process
    assert "the process of the planners of host 0 has ended with code -9: it is started again in 0.5 s" in caplog.text


@pytest.mark.parametrize("keeper", ["embedded"], indirect=True)
@pytest.mark.slow
def test_a_process_that_cannot_begin_is_given_up(store, monkeypatch):
    monkeypatch.setattr(planners_module, "_PROGRAM", "raise SystemExit(7)")
    with (
        Planners(text_of, store, first=0),
        pytest.raises(PlanningError, match="their process has ended 3 times as it began, last with code 7"),
    ):
        store.get(0, 60.0)
