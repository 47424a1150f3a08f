"""A rank that comes late to the model, as from a slow data loader: nothing of that can be balanced, and it is said."""

import pytest
from helpers.processes import caught_log_lines, for_each
from helpers.virtual_training import Run


def steps(run, num_steps, late_s, num_batches=1):
    for _ in range(num_steps):
        for _ in range(num_batches):
            run.time.now += 0.01 + late_s
            run.model(run.x).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.balancer.step()


def test_a_slow_data_loader_moves_lends_and_prunes_nothing_and_is_said_once(run_ranks):
    cases = [("exact", 1), ("semi", 3), ("zero-rd", 1)]

    @for_each(cases)
    def train(rank, group, mode, num_batches):
        with caught_log_lines() as lines:
            run = Run(group, mode=mode, update_every=2)
            steps(run, 16, 0.05 if rank == 1 else 0.0, num_batches)
        shares = [(one.pruned, one.lent, one.owned) for one in run.balancer.plan.ranks]
        late = [line for line in lines if "come late to the model" in line]
        return shares, run.balancer.metrics()["balance/busy_s"], late

    for (_, num_batches), first, second in zip(cases, *run_ranks(train, 2), strict=True):
        (shares, busy_s, lines), (others, late_busy_s, nothing) = first, second
        assert shares == others == [(0.0, 0.0, 1.0)] * 2
        assert late_busy_s - busy_s == pytest.approx(0.05 * num_batches)  # what a user measures
        assert nothing == [] and len(lines) == 1
        assert f"rank 1 by {50 * num_batches} ms" in lines[0]


@pytest.mark.slow
def test_a_straggler_that_is_late_too_gives_away_what_it_is_slow_in(run_ranks):
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
