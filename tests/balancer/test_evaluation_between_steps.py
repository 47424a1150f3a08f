"""What a program does between two steps, as an evaluation, changes no plan, however often updates are."""

import pytest
from helpers.virtual_training import Run


@pytest.mark.parametrize("update_every", [1, 2])
def test_a_long_evaluation_changes_no_plan(run_ranks, update_every):
    def train(rank, group):
        run = Run(group, chi={1: 4.0}, update_every=update_every)
        before = run.updates(8)[-1]
        run.time.now += 1e4
        return before, run.updates(6)

    for before, after in run_ranks(train, 2):
        assert before[1] > 0.4
        assert all(abs(ratios[1] - before[1]) < 0.1 for ratios in after)
