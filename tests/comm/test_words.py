"""Who waits long for others warns once, who fails ends with an error, and both say what each rank does."""

import logging
import re
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.processes import caught_log_lines
from torch import nn

import zeroresize as zr
from zeroresize.comm import rendezvous, words
from zeroresize.comm.exchange import Exchange
from zeroresize.comm.groups import CpuGroup
from zeroresize.comm.words import Call, Whereabouts, require_same_whereabouts

LATE_S, LIMIT_S = 3.0, 8.0


@pytest.fixture
def impatient(monkeypatch):
    """Waits are warned of after 1.2 s."""
    monkeypatch.setattr(rendezvous, "_WARNING_AFTER_S", 1.2)


def exchange_over(group, num_steps=0, call=Call.STEP):
    exchange = Exchange(CpuGroup(group, {}))
    exchange.where.call, exchange.where.num_steps = call, num_steps
    return exchange


# ---- long waits -----------------------------------------------------------------------------------------------------


def model_of(group):
    torch.manual_seed(0)
    return nn.Sequential(
        zr.ColumnParallelLinear(8, 16, process_group=group), nn.ReLU(), zr.RowParallelLinear(16, 8, process_group=group)
    )


def train(rank, num_steps, calls_step=True):
    """Return the warnings until all steps are made, or the other rank was waited for in vain."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=LIMIT_S))
    model = model_of(group)
    optimizer = torch.optim.AdamW(model.parameters())
    with caught_log_lines(logging.WARNING) as lines:
        balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(update_every=2))
        with suppress(RuntimeError):
            for _ in range(num_steps):
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if calls_step:
                    balancer.step()
            time.sleep(LIMIT_S)
        return [line for line in lines if "have not come" in line]


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_rank_that_never_calls_step_is_named_with_what_it_waits_for_instead(run_ranks):
    (warning,), warnings_of_other = run_ranks(lambda rank, group: train(rank, 5, calls_step=rank == 0), 2)
    assert warnings_of_other == []  # the lowest rank that waits speaks for all
    assert "ranks [1] of the group have not come" in warning
    assert "rank 0: balancer.step(), call 1: waits for the numbers of the other ranks" in warning
    assert "rank 1: training, after 0 calls of balancer.step(): waits for the other ranks in a collective" in warning
    assert f"It fails in {LIMIT_S - 2:.0f} s" in warning or f"It fails in {LIMIT_S - 1:.0f} s" in warning


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_of_three_ranks_the_lowest_that_waits_tells_and_says_when_it_goes_on(run_ranks):
    def exchange_late(rank, group):
        exchange = exchange_over(group)
        with caught_log_lines() as lines:
            for number in range(3):
                exchange.where.num_steps = number + 1
                if rank == 0 and number == 1:
                    time.sleep(LATE_S)
                exchange.meet(1.0)
        return lines

    late, (warning, went_on), silent = run_ranks(exchange_late, 3)
    assert late == silent == []
    assert warning.startswith("rank 1 has waited for 1 s: ranks [0] of the group have not come, ")
    assert "rank 0: busy, stopped or dead, last heard from at balancer.step(), call 1" in warning
    assert "rank 2: balancer.step(), call 2: waits for the numbers of the other ranks" in warning
    assert went_on.startswith("all ranks have come after ")


@pytest.mark.usefixtures("impatient")
def test_a_store_that_does_not_answer_is_asked_once_and_who_has_not_come_is_warned_of_all_the_same(run_ranks):
    def wait(rank, group):
        exchange, asked = exchange_over(group), []

        class Silent:
            def __getattr__(self, name):
                asked.append(name)
                raise ConnectionResetError("Connection reset by peer")

        exchange.words._rendezvous.store = Silent()
        with caught_log_lines(logging.WARNING) as lines:
            if rank == 1:
                time.sleep(LATE_S)
            exchange.meet()
        return lines, asked

    (lines, asked), _ = run_ranks(wait, 2)
    assert len(asked) == 1
    assert len(lines) == 1 and "ranks [1] of the group have not come" in lines[0]
    assert "others: not known, as the job's store cannot be reached" in lines[0]


def test_ranks_that_come_from_other_places_are_told_apart_by_all_that_must_be_the_same():
    step = Whereabouts(Call.STEP, 3, 1, 7, 3)
    for change, error in [
        ({"call": Call.TRAINING}, "made different calls: rank 0: balancer.step(), call 3; rank 1: training"),
        ({"num_work_changes": 1}, "unequally often: rank 0: 0 times; rank 1: 1 times; call it on every rank alike"),
        ({"num_steps": 2}, "did not call balancer.step() equally often: rank 0: 3 calls in 7 training forwards"),
        ({"num_forwards": 8}, "did not call balancer.step() equally often"),
        ({"num_optimizer_steps": 2}, "did not make equally many optimizer steps: rank 0: 3 steps; rank 1: 2 steps"),
        ({"epoch": 2}, "did not call balancer.epoch_end() equally often: rank 0: 1 epochs had ended"),
    ]:
        with pytest.raises(RuntimeError, match=re.escape(error)):
            require_same_whereabouts([step, replace(step, **change)])
    require_same_whereabouts([step, replace(step, num_forwards=8)], counts_forwards=False)
    require_same_whereabouts([replace(step, call=Call.LOADING), Whereabouts(Call.LOADING)])


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_that_fail_together_read_each_other_and_one_that_does_not_fail_is_known_from_before(run_ranks):
    def fail(rank, group):
        exchange = exchange_over(group, 7)
        exchange.meet()
        if rank == 2:
            return None
        time.sleep(0.5 * rank)
        exchange.where.call, exchange.where.num_steps = Call.TRAINING, 10 + rank
        began = time.monotonic()
        explanation = exchange.words.fail("an all-reduce failed")
        again = exchange.words.fail("its consequence")
        return explanation, again == explanation, time.monotonic() - began

    for explanation, is_told_once, seconds in run_ranks(fail, 3)[:2]:
        assert (
            "rank 0: training, after 10 calls of balancer.step(): an all-reduce failed; rank 1: training, after 11"
            in explanation
        )
        assert "rank 2: busy, stopped or dead, last heard from at balancer.step(), call 7" in explanation
        assert is_told_once and seconds < words.WAIT_S + 1


@pytest.mark.slow
def test_a_rank_that_has_not_failed_is_told_by_the_word_that_it_left_when_it_stood_still(run_ranks):
    """That is newer than the place at which numbers were last exchanged."""

    def wait(rank, group):
        exchange = exchange_over(dist.new_group([0, 1], timeout=timedelta(seconds=4)), 1)
        exchange.meet()
        exchange.where.num_steps = 10
        if rank == 1:
            exchange.where.call, exchange.where.num_steps = Call.TRAINING, 9
            exchange.words.moved()
            time.sleep(7.0)
            return ""
        with pytest.raises(RuntimeError, match=r"^ranks \[1\] of the group did not come to .* within 4 s, ") as error:
            exchange.meet()
        return str(error.value)

    text, _ = run_ranks(wait, 2)
    assert "rank 1: training, after 9 calls of balancer.step(): without a forward of the layers" in text
    assert "call 1 " not in text


@pytest.mark.slow
def test_a_balancer_that_was_let_go_of_is_told_apart_from_the_time_limit(run_ranks):
    def let_go(rank, group):
        exchange = exchange_over(group)
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
    assert "a connection closed after " in text and " within " not in text


def test_a_failure_that_was_overcome_is_not_told_again_and_nobody_waits_where_none_fails_with_it(run_ranks):
    def fail_twice(rank, group):
        exchange = exchange_over(group)
        first = exchange.words.fail("first", waits=rank == 0)
        exchange.meet()
        time.sleep(0.5)
        exchange.where.num_steps = 1
        began = time.monotonic()
        second = exchange.words.fail("second", waits=False) if rank == 0 else ""
        return first, second, time.monotonic() - began

    (first, second, seconds), _ = run_ranks(fail_twice, 2)
    assert first.count("first") == 2 and "first" not in second and "second" in second and seconds < 0.5
