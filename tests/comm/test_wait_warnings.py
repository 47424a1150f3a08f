"""A rank that waits long for others warns once, and says who has not come and what each rank does."""

import logging
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.processes import caught_log_lines
from torch import nn

import zeroresize as zr
from zeroresize.comm import rendezvous, waiting_note
from zeroresize.comm.cpu_group import CpuGroup
from zeroresize.comm.exchange import Exchange
from zeroresize.comm.whereabouts import Call

LATE_S, LIMIT_S = 3.0, 8.0


@pytest.fixture
def impatient(monkeypatch):
    """Waits are warned of after 1.2 s."""
    monkeypatch.setattr(waiting_note, "_LONG_S", 0.2)
    monkeypatch.setattr(rendezvous, "_WARNING_AFTER_S", 1.2)


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
def test_a_rank_that_never_calls_step_is_named_with_the_line_where_it_waits_instead(run_ranks):
    (warning,), warnings_of_other = run_ranks(lambda rank, group: train(rank, 5, calls_step=rank == 0), 2)
    assert warnings_of_other == []  # the lowest rank that waits speaks for all
    assert (
        "rank 0 waits for the numbers of the other ranks at balancer.step(), call 1 (test_wait_warnings.py" in warning
    )
    assert "ranks [1] of the group have not come" in warning
    assert f"It waits for {LIMIT_S - 2:.0f} s more" in warning or f"It waits for {LIMIT_S - 1:.0f} s more" in warning
    assert "rank 1 waits for the other ranks in a layer at training, after 0 calls of balancer.step() (" in warning


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_where_a_rank_makes_fewer_steps_the_others_warn_in_their_next_forward(run_ranks):
    warnings, _ = run_ranks(lambda rank, group: train(rank, 4 if rank == 0 else 2), 2)
    (warning,) = warnings
    assert "rank 0 waits for the other ranks in a layer at training, after 2 calls of balancer.step()" in warning
    assert "ranks [1] of the group have not come, as far as is known" in warning
    assert "rank 1 training, after 2 calls of balancer.step() (test_wait_warnings.py, line " in warning


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_of_three_ranks_the_lowest_that_waits_tells_and_says_when_it_goes_on(run_ranks):
    def exchange_late(rank, group):
        cpu_group = CpuGroup(group, {})
        exchange = Exchange(cpu_group)
        exchange.where.call = Call.STEP
        with caught_log_lines() as lines:
            for number in range(3):
                exchange.where.num_steps = number + 1
                if rank == 0 and number == 1:
                    time.sleep(LATE_S)
                exchange.meet(1.0)
        return lines

    late, *others = run_ranks(exchange_late, 3)
    assert late == []
    (warning, went_on), silent = others
    assert silent == []
    assert "rank 1 waits for the numbers of the other ranks at balancer.step(), call 2" in warning
    assert "ranks [0] of the group have not come." in warning
    assert "rank 0 does not wait, and was last heard from at balancer.step(), call 1" in warning
    assert "rank 2 waits for the numbers of the other ranks at balancer.step(), call 2" in warning
    assert went_on.startswith("all ranks have come after ")


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_who_does_not_make_the_balancer_is_waited_for_with_a_warning(run_ranks):
    def come_late(rank, group):
        if rank == 1:
            time.sleep(LATE_S)
        with caught_log_lines() as lines:
            CpuGroup(group, {})
        return lines

    (warning,), late = run_ranks(come_late, 2)
    assert late == []
    assert warning.startswith("rank 0 of the group has waited for 1 s to agree on what to balance: ranks [1] have not")


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_short_waits_are_not_told_and_write_nothing(run_ranks):
    def meet_often(rank, group):
        cpu_group = CpuGroup(group, {})
        exchange, written = Exchange(cpu_group), []
        store = cpu_group._rendezvous.store

        class Counting:
            def __getattr__(self, name):
                return lambda *arguments: written.append(name) or getattr(store, name)(*arguments)

        cpu_group._rendezvous.store = Counting()
        with caught_log_lines() as lines:
            for _ in range(20):
                exchange.meet(1.0)
                time.sleep(0.1)
        return lines, written

    assert run_ranks(meet_often, 2) == [([], []), ([], [])]
