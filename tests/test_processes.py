"""The fixture that all multi-process tests rest on."""

import multiprocessing
import os
import signal
import time
import types

import pytest
import torch.distributed as dist
from helpers.processes import RankFailure, RankPool, for_each


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    assert multiprocessing.active_children() == []


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
