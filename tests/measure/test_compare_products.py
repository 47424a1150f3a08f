"""Products at even shares and at those in force, timed in turn, on a clock that counts multiplications."""

import pytest
from helpers.processes import instances_of
from helpers.virtual_training import Run

from zeroresize.measure import rank_monitor
from zeroresize.measure.rank_monitor import RankMonitor
from zeroresize.measure.timed_products import compare_products, time_reference


@pytest.mark.parametrize("chi", [1.0, 7.0])
def test_the_ratio_is_the_share_that_a_rank_owns_at_any_speed(run_ranks, chi):
    def train(rank, group):
        with instances_of(RankMonitor) as monitors:
            run = Run(group, gather_s=0.0, mode="off", update_every=4)
        run.updates(1)
        run.balancer.move((3, 1))
        run.time.chi = chi
        monitor = monitors[0]
        return compare_products(monitor._layers, monitor.state.num_tokens)

    assert run_ranks(train, 2) == pytest.approx([1.5, 0.5], rel=1e-3)


def test_what_saw_no_tokens_is_not_compared(run_ranks):
    def train(rank, group):
        with instances_of(RankMonitor) as monitors:
            Run(group, gather_s=0.0, mode="off", update_every=4)
        return compare_products(monitors[0]._layers, {})

    assert run_ranks(train, 2) == [None, None]


def test_a_rank_that_owns_nothing_is_seen_to_become_slow_and_to_recover(run_ranks):
    """By a reference product at every update, since it has no products of its own."""

    def train(rank, group):
        with instances_of(RankMonitor) as monitors:
            run = Run(group, gather_s=0.0, mode="off", update_every=4)
        run.updates(3)
        run.balancer.move((1, 0))
        believed = []
        for chi in (1.0, 5.0, 1.0):
            run.time.chi = chi if rank == 1 else 1.0
            run.updates(3)
            believed.append(monitors[0].times.gemm_s)
        return believed

    _, (before, slow, after) = run_ranks(train, 2)
    assert slow / before == pytest.approx(5.0, rel=0.2)
    assert after / before == pytest.approx(1.0, rel=0.2)


def test_a_reference_tells_the_products_of_a_whole_step(run_ranks):
    def train(rank, group):
        with instances_of(RankMonitor) as monitors:
            run = Run(group, gather_s=0.0, mode="off", update_every=4)
        run.updates(2)
        monitor = monitors[0]
        return time_reference(monitor._layers, monitor.state.num_tokens), monitor.times.gemm_s

    for by_reference, by_steps in run_ranks(train, 2):  # steps leave out the first layer's dgrad
        assert by_reference == pytest.approx(1.2 * by_steps, rel=1e-2)


@pytest.mark.parametrize("shares", [(3, 1), (1, 0)])
def test_what_cannot_be_compared_on_one_rank_holds_up_nobody(run_ranks, shares):
    def train(rank, group):
        run = Run(group, gather_s=0.0, mode="off", update_every=4)
        run.updates(2)

        def fail(*_):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1e12 bytes")

        if rank == 1:
            rank_monitor.compare_products = rank_monitor.time_reference = fail
        run.balancer.move(shares)
        run.updates(2)
        return run.balancer.plan.owned

    wanted = tuple(2.0 * share / sum(shares) for share in shares)
    assert run_ranks(train, 2, timeout_s=20) == [wanted] * 2
