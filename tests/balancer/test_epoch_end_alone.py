"""``epoch_end`` or ``release`` on some ranks only, in modes that migrate: nothing is computed from what went astray.

An epoch that ends on one rank only is an error on every rank; a release, where nothing can be pinned, changes nothing.
"""

import datetime

import pytest
import torch
import torch.distributed as dist
from helpers.virtual_training import Run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alone", "mode"),
    [
        (1, "semi"),
        pytest.param(0, "mig", marks=pytest.mark.slow),
        pytest.param(1, "mig", marks=pytest.mark.slow),
        pytest.param(0, "semi", marks=pytest.mark.slow),
    ],
)
def test_an_epoch_that_ends_on_one_rank_only_is_an_error_on_every_rank(run_ranks, mode, alone):
    """Who ends it says who did not come; who trains on finds nobody to sum with, instead of that one's weights."""

    def train(rank, group):
        impatient = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=3))
        run = Run(impatient, chi={1: 4.0}, mode=mode, update_every=5, **({"budget": 0.0} if mode == "semi" else {}))
        run.steps(23)
        loans = run.balancer.plan.loans
        weights = run.model.up.weight.detach().clone()
        with pytest.raises(RuntimeError) as error:
            if rank == alone:
                run.balancer.epoch_end()
            run.steps(5)
        return bool(loans), str(error.value), torch.equal(run.model.up.weight, weights)

    results = run_ranks(train, 2, timeout_s=20)
    assert all(lends and is_unchanged for lends, _, is_unchanged in results)
    assert f"ranks [{1 - alone}] of the group did not come" in results[alone][1]


@pytest.mark.parametrize("mode", ["mig", "semi"])
def test_an_epoch_that_ends_on_every_rank_goes_on(run_ranks, mode):
    def train(rank, group):
        run = Run(group, chi={1: 4.0}, mode=mode, update_every=5)
        run.steps(23)
        run.balancer.epoch_end()
        return bool(run.balancer.plan.loans), len(run.steps(12))

    assert run_ranks(train, 2, timeout_s=20) == [(True, 12)] * 2


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("mode", ["mig", "semi"])
@pytest.mark.parametrize("alone", [0, 1])
def test_a_release_on_one_rank_only_sends_nothing_and_training_goes_on(run_ranks, mode, alone):
    def train(rank, group):
        impatient = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=3))
        expected = Run(impatient, mode="off").steps(35)[23:]
        run = Run(impatient, chi={1: 4.0}, mode=mode, update_every=5, **({"budget": 0.0} if mode == "semi" else {}))
        run.steps(23)
        loans, moved = run.balancer.plan.loans, run.balancer.bytes_migrated
        if rank == alone:
            run.balancer.release()
        assert loans and run.balancer.bytes_migrated == moved
        return expected, run.steps(12)

    for expected, losses in run_ranks(train, 2, timeout_s=20):
        assert losses == pytest.approx(expected, rel=1e-4)
