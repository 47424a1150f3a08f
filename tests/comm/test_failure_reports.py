"""What the ranks tell each other when they fail."""

import time

from zeroresize.comm import failure_reports
from zeroresize.comm.cpu_group import CpuGroup
from zeroresize.comm.exchange import Exchange
from zeroresize.comm.whereabouts import Call


def test_ranks_that_fail_together_read_each_other_and_one_that_does_not_fail_is_known_from_before(run_ranks):
    def fail(rank, group):
        exchange = Exchange(CpuGroup(group, {}))
        exchange.where.call, exchange.where.num_steps = Call.STEP, 7
        exchange.meet()
        if rank == 2:
            return None
        time.sleep(0.5 * rank)
        exchange.where.call, exchange.where.num_steps = Call.TRAINING, 10 + rank
        began = time.monotonic()
        explanation = exchange._group.reports.tell("an all-reduce failed")
        again = exchange._group.reports.tell("its consequence")
        return explanation, again == explanation, time.monotonic() - began

    for explanation, is_told_once, seconds in run_ranks(fail, 3)[:2]:
        assert (
            "rank 0: training, after 10 calls of balancer.step(): an all-reduce failed; rank 1: training, after 11"
            in explanation
        )
        assert "rank 2: has not reported, last heard from at balancer.step(), call 7" in explanation
        assert is_told_once and seconds < failure_reports.WAIT_S + 1


def test_a_failure_that_was_overcome_is_not_told_again(run_ranks):
    def fail_twice(rank, group):
        exchange = Exchange(CpuGroup(group, {}))
        first = exchange._group.reports.tell("first", waits=rank == 0)
        exchange.meet()
        time.sleep(0.5)
        exchange.where.num_steps = 1
        return first, exchange._group.reports.tell("second", waits=False) if rank == 0 else ""

    (first, second), _ = run_ranks(fail_twice, 2)
    assert first.count("first") == 2 and "first" not in second and "second" in second


def test_one_that_fails_alone_does_not_wait_where_nobody_fails_with_it(run_ranks):
    def fail(rank, group):
        exchange = Exchange(CpuGroup(group, {}))
        began = time.monotonic()
        if rank == 0:
            exchange._group.reports.tell("its own mistake", waits=False)
        return time.monotonic() - began

    assert max(run_ranks(fail, 2)) < 0.5
