"""What the ranks tell each other when they fail."""

import json
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from zeroresize.comm import failure_reports
from zeroresize.comm.cpu_group import CpuGroup
from zeroresize.comm.exchange import Exchange
from zeroresize.comm.whereabouts import Call


@pytest.mark.slow
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
        assert (
            "rank 2: has not reported, and when numbers were last exchanged it was at balancer.step(), call 7 (may be"
            in explanation
        )
        assert is_told_once and seconds < failure_reports.WAIT_S + 1


@pytest.mark.slow
def test_a_rank_that_has_not_failed_is_told_by_the_word_that_it_left_while_others_waited(run_ranks):
    """That is newer than the place at which numbers were last exchanged."""

    def wait(rank, group):
        impatient = dist.new_group([0, 1], timeout=timedelta(seconds=4))
        exchange = Exchange(CpuGroup(impatient, {}))
        exchange.where.call, exchange.where.num_steps = Call.STEP, 1
        exchange.meet()
        exchange.where.num_steps = 10
        if rank == 1:
            exchange.where.call, exchange.where.num_steps = Call.TRAINING, 9
            exchange._group.waiting.start()
            exchange._group.wait_warnings._leave(json.dumps(exchange._group.wait_warnings._word(None, 3.0)))
            time.sleep(7.0)
            return ""
        with pytest.raises(RuntimeError, match=r"^ranks \[1\] of the group did not come to .* within 4 s: ") as error:
            exchange.meet()
        return str(error.value)

    text, _ = run_ranks(wait, 2)
    assert (
        "rank 1: has not reported its failure, and its last word was: training, after 9 calls of balancer.step()"
        in text
    )
    assert "call 1 " not in text


@pytest.mark.slow
def test_a_balancer_that_was_let_go_of_is_told_apart_from_the_time_limit(run_ranks):
    def let_go(rank, group):
        exchange = Exchange(CpuGroup(group, {}))
        exchange.meet()
        if rank == 1:
            exchange.close()
            time.sleep(3.0)  # the process lives on
            return ""
        time.sleep(0.5)
        with pytest.raises(RuntimeError) as error:
            exchange.meet()
        return str(error.value)

    text, _ = run_ranks(let_go, 2)
    assert "ranks [1] of the group did not come to " in text and "let go of its Balancer" in text
    assert " closed, before the time limit of " in text and " within " not in text


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
