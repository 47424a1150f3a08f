"""Planners: all plans come, in order and once, whatever happens to the processes that make them."""

import ast
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.planning import (
    RecordedPlan,
    SlowToLoad,
    Unloadable,
    drawn_text,
    fork_planners,
    is_alive,
    text_of,
    wait_until,
)

from zeroresize.microbatch import planners as planners_module
from zeroresize.microbatch.planners import Planners
from zeroresize.microbatch.planning_process import PlanningError
from zeroresize.microbatch.store import StoreError


@pytest.fixture
def folder(tmp_path):
    """Where planners leave what they did."""
    path = tmp_path / "planned"
    path.mkdir()
    return path


@pytest.fixture
def start(forked, store):
    """Starts planners that are closed in the end."""
    started = []

    def start(plan, store=store, **options):
        started.append(Planners(plan, store, **{"series": 1, "first": 0, **options}))
        return started[-1]

    yield start
    for each in started:
        each.close()


def fetched(store, iteration, timeout_s=20.0, series=1):
    return store.get(series, iteration, timeout_s, lambda: "planners plan", warns=False)


def all_fetched(planners, store, iterations):
    """What ranks get of these iterations, one after another."""
    texts = []
    for iteration in iterations:
        planners.advance(iteration)
        texts.append(fetched(store, iteration))
    return texts


def left_in(store, most=40, series=1):
    """The iterations of which something is in the store."""
    return [iteration for iteration in range(most) if store._store.check([f"plan/{series}/{iteration}"])]


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def test_every_plan_comes_once_and_is_the_same_whichever_process_makes_it(start, store, folder):
    texts = []
    for series, num_workers in ((2, 1), (3, 3)):
        drawing = start(drawn_text, series=series, last=11, num_workers=num_workers, ahead=12)
        texts.append([fetched(store, iteration, series=series) for iteration in range(12)])
        drawing.close()
    assert texts[0] == texts[1] and len(set(texts[0])) == 12
    plan, first, num_workers = RecordedPlan(folder), 17, 3
    iterations = range(first, first + 20)
    planners = start(plan, first=first, last=first + 19, num_workers=num_workers)
    assert all_fetched(planners, store, iterations) == [text_of(iteration) for iteration in iterations]
    wait_until(lambda: len(planners.seconds) == 20)
    assert all(0.0 < seconds < 10.0 for seconds in dict(planners.seconds).values())
    assert sorted(dict(planners.seconds)) == plan.begun() == list(iterations)
    assert all(len(plan.process_ids(iteration)) == 1 for iteration in iterations)
    assert len({plan.process_ids(iteration)[0] for iteration in iterations}) <= num_workers


def test_planners_stay_as_far_ahead_as_they_are_told_and_drop_what_is_over(start, store, folder):
    plan = RecordedPlan(folder)
    planners = start(plan, first=2, num_workers=2, ahead=3)
    wait_until(lambda: left_in(store) == [2, 3, 4, 5])
    time.sleep(0.3)
    assert plan.begun() == [2, 3, 4, 5]
    planners.advance(4)
    wait_until(lambda: left_in(store) == [4, 5, 6, 7])
    planners.advance(20)  # whoever is further is followed
    wait_until(lambda: left_in(store) == [20, 21, 22, 23])
    time.sleep(0.3)
    assert plan.begun() == [2, 3, 4, 5, 6, 7, 20, 21, 22, 23]


def test_hosts_share_the_iterations(start, keeper, folder):
    num_nodes = 3
    stores = [keeper.another(node=node, num_nodes=num_nodes) for node in range(num_nodes)]
    of_hosts = [start(RecordedPlan(folder), store, first=3, last=16, ahead=5) for store in stores]
    for iteration in range(3, 17):
        for planners in of_hosts:
            planners.advance(iteration)
        assert fetched(keeper.store, iteration) == text_of(iteration)
    wait_until(lambda: sum(len(planners.seconds) for planners in of_hosts) == 14)
    for node, planners in enumerate(of_hosts):
        assert list(dict(planners.seconds)) == [
            iteration for iteration in range(3, 17) if iteration % num_nodes == node
        ]


def test_another_series_is_planned_by_the_same_processes(start, store, folder):
    """What was planned for the series before is dropped, also what comes of it later."""
    plan = RecordedPlan(folder, slow=(2,))
    planners = start(plan, ahead=4, num_workers=2)
    wait_until(lambda: left_in(store) == [0, 1, 3, 4])
    other = RecordedPlan(folder / "other")
    other.folder.mkdir()
    planners.restart(other, 2, 1)
    wait_until(lambda: left_in(store, series=2) == [1, 2, 3, 4, 5])
    plan.go()
    planners.advance(2)
    wait_until(lambda: left_in(store, series=2) == [2, 3, 4, 5, 6])
    wait_until(lambda: left_in(store) == [])
    assert {*other.process_ids(2), *other.process_ids(6)} <= {*plan.process_ids(0), *plan.process_ids(1)}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (signal.SIGKILL, "ended, as where memory runs out (BrokenProcessPool: "),
        (signal.SIGSTOP, "took longer than 1.5 s while it planned iteration 2: another takes its place"),
    ],
    ids=["killed", "stopped"],
)
def test_a_planner_that_is_lost_is_replaced_and_the_others_go_on(start, store, folder, caplog, how, why):
    plan = RecordedPlan(folder, slow=(2,))
    planners = start(plan, num_workers=2, ahead=9, deadline_s=300.0 if how == signal.SIGKILL else 1.5)
    wait_until(lambda: plan.process_ids(2))
    assert re.match(r"the planners of node 0 \(2\) plan .*iteration 2 for \d", planners.doing())
    (lost,) = plan.process_ids(2)
    os.kill(lost, how)
    if how == signal.SIGKILL:
        wait_until(lambda: len(plan.process_ids(2)) == 2)
    plan.go()
    assert all_fetched(planners, store, range(10)) == [text_of(iteration) for iteration in range(10)]
    assert len({lost, *plan.process_ids(2)}) == 2 and not is_alive(lost)
    (text,) = messages(caplog)
    assert text.startswith(f"one of the planners of node 0 {why}")
    wait_until(lambda: planners.doing().endswith("plan nothing"))
    idle = {process for iteration in range(3, 19) for process in plan.process_ids(iteration)} - {lost}
    for process in idle:
        os.kill(process, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, idle)))
    assert all_fetched(planners, store, [40, 41]) == [text_of(40), text_of(41)]


def test_a_slow_start_counts_neither_as_planning_nor_as_waiting(start, store, monkeypatch):
    start(SlowToLoad(), deadline_s=0.5)
    assert fetched(store, 0, timeout_s=1.5) == text_of(0)
    with pytest.raises(PlanningError, match=r"the last did not start within 0\.5 s while it planned iteration 0"):
        monkeypatch.setattr(planners_module, "_START_S", 0.5)
        start(SlowToLoad(), series=2, deadline_s=0.5)
        fetched(store, 0, series=2)


@pytest.mark.parametrize(
    ("how", "why"), [("deadly", "ended, as where memory runs out"), ("stopped", "took longer than 0.5 s")]
)
def test_an_iteration_that_costs_all_its_planners_is_an_error_and_the_others_come(start, store, folder, how, why):
    plan = RecordedPlan(folder, **{how: (2,)})
    start(plan, last=5, deadline_s=0.5)
    text = f"iteration 2 cannot be planned: 3 of the planners of node 0 have failed, the last {why}"
    with pytest.raises(PlanningError, match=text):
        fetched(store, 2)
    assert len(plan.process_ids(2)) == 3
    assert fetched(store, 4) == text_of(4)
    assert not any(map(is_alive, plan.process_ids(2)))


def test_processes_that_cannot_be_started_are_an_error(start, store, monkeypatch):
    def fail(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(planners_module, "ProcessPoolExecutor", fail)
    start(text_of)
    with pytest.raises(PlanningError, match=r"iteration 0 cannot be planned: 3 .*OSError: no more processes"):
        fetched(store, 0)


def test_errors_of_planning_reach_who_waits(start, store, folder):
    plan = RecordedPlan(folder, invalid=(1,), broken=(2,))
    start(plan)
    assert fetched(store, 0) == text_of(0)
    with pytest.raises(ValueError, match=r"^iteration 1 cannot be planned: sample 3 has 17 tokens.*16 fit$"):
        fetched(store, 1)
    with pytest.raises(PlanningError, match=r"(?s)^iteration 2 cannot be planned: KeyError.*in __call__"):
        fetched(store, 2)
    assert fetched(store, 3) == text_of(3)
    time.sleep(0.3)
    assert len(plan.process_ids(1)) == 1  # it would fail again


def len_of_nothing(iteration):
    return 0


def large_text(iteration):
    return random.Random(0).randbytes(10_000_000).hex()


def test_what_is_no_plan_is_an_error(start, store):
    for series, (plan, text) in enumerate([
        (len_of_nothing, "returned int: text is needed"),
        (large_text, r"its plan has 1\d+ bytes, and a store takes \d+ at most"),
        (Unloadable(), "processes cannot load the function that plans .OSError: the file of lengths"),
    ]):  # fmt: skip
        start(plan, series=series, ahead=1)
        with pytest.raises(PlanningError, match=text):
            fetched(store, 0, series=series)


def test_planners_that_are_closed_end_at_once_and_who_waits_hears_of_it(start, keeper, folder):
    plan = RecordedPlan(folder, slow=(0, 1))
    planners = start(plan, num_workers=2)
    files = planners._folder
    wait_until(lambda: plan.begun() == [0, 1])
    timer = threading.Timer(0.3, planners.close)
    timer.start()
    with pytest.raises(PlanningError, match="iteration 0 cannot be planned: the planners of node 0 have ended"):
        fetched(keeper.another(), 0)
    began = time.monotonic()
    timer.join()
    assert time.monotonic() - began < 1.5
    assert not any(map(is_alive, [*plan.process_ids(0), *plan.process_ids(1)])) and not files.exists()
    planners.close()


def test_a_fork_of_the_training_process_ends_no_planners(start, store, folder):
    planners = start(RecordedPlan(folder))
    fetched(store, 0)
    fork = multiprocessing.get_context("fork").Process(target=planners.close)
    fork.start()
    fork.join()
    planners.advance(9)
    assert fetched(store, 9) == text_of(9)
    (first,) = RecordedPlan(folder).process_ids(0)
    assert RecordedPlan(folder).process_ids(9) == [first]


def test_nothing_is_left_when_the_training_process_dies(keeper, folder, monkeypatch):
    plan = RecordedPlan(folder, slow=(0, 1))
    fork_planners(monkeypatch)

    def train():
        held = Planners(plan, keeper.another(), series=1, first=0, num_workers=2)
        wait_until(lambda: plan.begun() == [0, 1])
        (folder / "files").write_text(str(held._folder))
        os.kill(os.getpid(), signal.SIGKILL)

    training = multiprocessing.get_context("fork").Process(target=train)
    training.start()
    training.join(20.0)
    assert training.exitcode == -signal.SIGKILL
    processes = [*plan.process_ids(0), *plan.process_ids(1)]
    assert len(processes) == 2
    wait_until(lambda: not any(map(is_alive, processes)), 3.0)
    assert not Path((folder / "files").read_text()).exists()


def test_a_store_that_dies_is_named_and_planners_end(start, keeper, folder, caplog):
    plan = RecordedPlan(folder)
    planners = start(plan, ahead=2)
    reader = keeper.another()
    assert fetched(reader, 0) == text_of(0)
    keeper.kill()
    planners.advance(7)
    with pytest.raises(StoreError, match="was asked to fetch the plan of iteration 7"):
        fetched(reader, 7)
    wait_until(lambda: not is_alive(plan.process_ids(0)[0]))
    assert any("the planners of node 0 stop: the instruction store at" in text for text in messages(caplog))


def test_what_cannot_be_planned_is_refused_before_anything_starts(start, monkeypatch):
    monkeypatch.setattr(planners_module, "_Worker", lambda _: pytest.fail("something starts"))
    for values, text in (({"plan": lambda iteration: ""}, "cannot be given to other processes"),):
        with pytest.raises(ValueError, match=text):
            start(**{"plan": text_of, **values})


_PROGRAM = """
import os, sys
print("program", flush=True)
sys.path[:0] = {path}
from helpers.planning import {plan}
from zeroresize.microbatch.planners import Planners
from zeroresize.microbatch.store import SharedStore, served_store

store = SharedStore(served_store(), "here")
planners = Planners({plan}, store, series=1, first=0, ahead=1)
print(store.get(1, 0, 60.0, planners.doing, warns=True), flush=True)
print([each.pid for worker in planners._workers for each in worker._processes], flush=True)
{end}
"""


def run_program(plan, tmp_path, end=""):
    """What a program without a guard prints, which starts planners and does not close them; and its errors."""
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM.format(path=sys.path, plan=plan, end=end))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=90.0)
    name, text, processes = done.stdout.splitlines()
    assert name == "program" and len(ast.literal_eval(processes)) == 1
    wait_until(lambda: not any(map(is_alive, ast.literal_eval(processes))), 3.0)
    return text, done.stderr


def test_a_program_needs_no_guard_and_leaves_nothing(tmp_path):
    text, errors = run_program("limits_text", tmp_path)
    assert json.loads(text) == {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # On a machine at work it may say that a plan is waited for, and torch that planners' store has gone.
    assert "Traceback" not in errors and "leaked" not in errors, errors


@pytest.mark.slow
def test_a_program_that_fails_while_a_planner_is_stopped_ends_and_leaves_nothing(tmp_path):
    end = "planners.advance(1); store.get(1, 1, 1.0, planners.doing, warns=True)"
    text, errors = run_program("stop_at_1", tmp_path, end)
    assert text == text_of(0) and "PlanningError: no plan of iteration 1 came" in errors
