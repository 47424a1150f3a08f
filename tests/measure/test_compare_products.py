"""Products at even shares and at those in force, timed in turn, on a clock that counts multiplications."""

import pytest
from virtual_training import Run

from zeroresize.measure.compare_products import compare_products


@pytest.mark.parametrize("chi", [1.0, 7.0])
def test_the_ratio_is_the_share_that_a_rank_owns_at_any_speed(run_ranks, chi):
    def train(rank, group):
        run = Run(group, gather_s=0.0, mode="off", update_every=4)
        run.updates(1)
        run.balancer.move((3, 1))
        run.time.chi = chi
        monitor = run.balancer._parts.monitor
        return compare_products(monitor._layers, monitor._num_tokens)

    assert run_ranks(train, 2) == pytest.approx([1.5, 0.5], rel=1e-3)


def test_what_saw_no_tokens_is_not_compared(run_ranks):
    def train(rank, group):
        run = Run(group, gather_s=0.0, mode="off", update_every=4)
        return compare_products(run.balancer._parts.monitor._layers, {})

    assert run_ranks(train, 2) == [None, None]


def test_a_rank_that_owns_nothing_is_seen_to_become_slow_and_to_recover(run_ranks):
    """By a reference product at every update, since it has no products of its own."""

    def train(rank, group):
        run = Run(group, gather_s=0.0, mode="off", update_every=4)
        run.updates(3)
        run.balancer.move((1, 0))
        believed = []
        for chi in (1.0, 5.0, 1.0):
            run.time.chi = chi if rank == 1 else 1.0
            run.updates(3)
            believed.append(run.balancer._parts.monitor.times.gemm_s)
        return believed

    _, (before, slow, after) = run_ranks(train, 2)
    assert slow / before == pytest.approx(5.0, rel=0.2)
    assert after / before == pytest.approx(1.0, rel=0.2)
