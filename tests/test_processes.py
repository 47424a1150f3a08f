"""The fixture that all multi-process tests rest on."""

import multiprocessing
import os
import signal
import subprocess
import time
import types

import pytest
import torch
import torch.distributed as dist
from helpers.processes import RankFailure, RankPool, for_each


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    assert multiprocessing.active_children() == []


def test_results_come_back_by_rank(run_ranks):
    offset = 10

    def nested(rank, group, factor):
        time.sleep(0.1 * (2 - rank))
        return factor * rank + offset, torch.full((2,), float(rank))

    results = run_ranks(nested, 3, 5)

    assert [number for number, _ in results] == [10, 15, 20]
    assert [tensor.tolist() for _, tensor in results] == [[0, 0], [1, 1], [2, 2]]


def test_tests_of_a_module_run_whole_in_ranks_that_are_started_once(tmp_path):
    module = types.ModuleType("made")

    def adds(run_ranks, monkeypatch, number):
        monkeypatch.setenv("MADE", str(number + int(os.environ.get("MADE", "0"))))
        assert run_ranks(lambda rank, group: (rank, os.environ["MADE"]), 2) == [(0, str(number)), (1, str(number))]
        assert run_ranks(lambda rank, group: group.size(), 1) == [1]

    def fails(run_ranks):
        assert run_ranks(lambda rank, group: rank == 1, 2) == [False, False]

    module.adds, module.fails = adds, fails
    pool = RankPool(module, 2, tmp_path)
    try:
        for number in (3, 4):
            pool.run("adds", {"number": number})
        with pytest.raises(RankFailure, match=r"(?s)rank 0 of 2 failed.*assert \[False, True\] == "):
            pool.run("fails", {})
    finally:
        pool.close()


def test_a_rank_that_ends_early_leaves_the_others_connected(run_ranks):
    def late_all_reduce(rank, group):
        others = dist.new_group([1, 2])
        if rank > 0:
            time.sleep(0.3)
            dist.all_reduce(torch.ones(1), group=others)
        return dist.get_rank(group), dist.get_world_size(group)

    assert run_ranks(late_all_reduce, 3) == [(0, 3), (1, 3), (2, 3)]


def test_autograd_works_in_ranks_after_use_in_parent_and_large_results_come_back(run_ranks):
    def gradient(rank=0, group=None):
        w = torch.ones(64, 64, requires_grad=True)
        (w @ w).sum().backward()
        torch.optim.SGD([w], lr=0.1).step()
        return w.grad.expand(128, 64, 64).clone()

    expected = gradient()
    for _ in range(2):  # a test can run ranks twice
        assert all(torch.equal(result, expected) for result in run_ranks(gradient, 2))


def test_a_raising_rank_fails_with_its_own_traceback_and_ends_the_others(run_ranks):
    def raise_in_rank_one(rank, group):
        if rank == 1:
            raise KeyError("from the second rank")
        dist.barrier(group)  # which rank 1 never reaches

    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(raise_in_rank_one, 3)

    text = str(failure.value)
    assert time.monotonic() - started < 10
    assert "rank 1 of 3 failed" in text
    assert "KeyError: 'from the second rank'" in text
    assert "in raise_in_rank_one" in text
    assert "rank 0 of 3" not in text


def test_cases_run_in_the_same_ranks_and_the_one_that_fails_is_named(run_ranks):
    @for_each([(1, "a"), (2, "b")])
    def check(rank, group, number, letter):
        if rank == number:
            raise KeyError("from the second rank")
        return os.getpid(), number * letter

    ((first, second),) = run_ranks(check, 1)
    assert first[0] == second[0] and [first[1], second[1]] == ["a", "bb"]
    with pytest.raises(RankFailure, match=r"from the second rank'\nin the case \(1, 'a'\)"):
        run_ranks(check, 2)


def test_a_dying_rank_is_named(run_ranks):
    def die(rank, group):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    with pytest.raises(RankFailure, match="rank 0 of 2 failed:\nthe process died with exit code -9"):
        run_ranks(die, 2)


def test_a_result_that_cannot_be_pickled_fails(run_ranks):
    with pytest.raises(RankFailure, match="rank 0 of 1 failed"):
        run_ranks(lambda rank, group: lambda: None, 1)


def test_a_hanging_rank_times_out_and_shows_where(run_ranks):
    def hang_in_rank_one(rank, group):
        if rank == 1:
            time.sleep(60)
        return rank

    with pytest.raises(RankFailure) as failure:
        run_ranks(hang_in_rank_one, 2, timeout_s=1.0)

    text = str(failure.value)
    assert "still running after 1.0 s: ranks [1] of 2" in text
    assert "in hang_in_rank_one" in text


def test_what_a_rank_starts_ends_with_it(run_ranks):
    def start_sleeper(rank, group):
        return subprocess.Popen(["sleep", "60"]).pid

    (sleeper,) = run_ranks(start_sleeper, 1)

    deadline = time.monotonic() + 5
    while _is_running(sleeper) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(sleeper)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
