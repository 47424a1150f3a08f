"""Numbers cross the group without anybody waiting in between."""

import time

import pytest
from processes import RankFailure

from zeroresize.cpu_group import CpuGroup
from zeroresize.exchange import Exchange


def test_every_rank_sees_the_table_of_the_last_post(run_ranks):
    def exchange_twice(rank, group):
        exchange = Exchange(CpuGroup(group, {}))
        tables = [exchange.collect()]
        for update in range(2):
            exchange.post([float(rank), float(update)])
            tables.append(exchange.collect())
        return tables

    for tables in run_ranks(exchange_twice, 3):
        assert tables == [None, *([[float(r), float(update)] for r in range(3)] for update in range(2))]


def test_posting_does_not_wait_for_a_late_rank(run_ranks):
    def post(rank, group):
        exchange = Exchange(CpuGroup(group, {}))
        if rank == 1:
            time.sleep(1.0)
        began = time.perf_counter()
        exchange.post([1.0])
        seconds = time.perf_counter() - began
        exchange.collect()
        return seconds

    early, _ = run_ranks(post, 2)
    assert early < 0.5


def test_posting_twice_without_collecting_is_an_error(run_ranks):
    def post_twice(rank, group):
        exchange = Exchange(CpuGroup(group, {}))
        exchange.post([1.0])
        with pytest.raises(RuntimeError, match="not been collected"):
            exchange.post([1.0])
        exchange.collect()

    run_ranks(post_twice, 2)


def test_a_dead_rank_ends_the_others_with_an_error(run_ranks):
    def die_or_collect(rank, group):
        exchange = Exchange(CpuGroup(group, {}))
        if rank == 1:
            raise KeyError("this rank dies")
        exchange.post([1.0])
        exchange.collect()

    began = time.perf_counter()
    with pytest.raises(RankFailure, match="this rank dies"):
        run_ranks(die_or_collect, 2, timeout_s=30)
    assert time.perf_counter() - began < 20
