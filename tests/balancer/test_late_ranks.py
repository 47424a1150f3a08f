"""A rank that comes late to the model, as from a slow data loader: nothing of that can be balanced, and it is said."""

import logging

import pytest
from helpers.virtual_training import Run

MODES = ("exact", "semi", "mig", "zero-rd")


@pytest.fixture
def said(caplog):
    """Of the balancer, by this rank."""

    def lines():
        return [one.getMessage() for one in caplog.records if "come late to the model" in one.getMessage()]

    with caplog.at_level(logging.INFO, logger="zeroresize"):
        yield lines


def steps(run, num_steps, late_s, num_batches=1):
    for _ in range(num_steps):
        for _ in range(num_batches):
            run.time.now += 0.01 + late_s
            run.model(run.x).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.balancer.step()


@pytest.mark.few(3)
@pytest.mark.parametrize("num_batches", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_slow_data_loader_moves_lends_and_prunes_nothing_and_is_said_once(run_ranks, said, mode, num_batches):
    def train(rank, group):
        run = Run(group, mode=mode, update_every=2)
        steps(run, 16, 0.05 if rank == 1 else 0.0, num_batches)
        shares = [(one.pruned, one.lent, one.owned) for one in run.balancer.plan.ranks]
        return shares, run.balancer.metrics()["balance/busy_s"], said()

    (shares, busy_s, lines), (others, late_busy_s, nothing) = run_ranks(train, 2)
    assert shares == others == [(0.0, 0.0, 1.0)] * 2
    assert late_busy_s - busy_s == pytest.approx(0.05 * num_batches)  # what a user measures
    assert nothing == [] and len(lines) == 1
    assert f"rank 1 by {50 * num_batches} ms" in lines[0]


@pytest.mark.slow
def test_a_straggler_that_is_late_too_gives_away_what_it_is_slow_in(run_ranks, said):
    """As much, lent or moved, as without being late."""

    def train(rank, group):
        kept = []
        for late_s in (0.0, 0.05):
            run = Run(group, mode="off", update_every=2)
            run.time.chi = 2.0 if rank == 1 else 1.0
            steps(run, 16, late_s if rank == 1 else 0.0)
            would = run.balancer.what_if()["exact"]
            kept.append(would["owned"][1] - would["lent"][1])
            run.balancer.close()
        return kept

    (alone, late), others = run_ranks(train, 2)
    assert [alone, late] == others and alone < 0.9 and late == pytest.approx(alone, rel=0.02)
