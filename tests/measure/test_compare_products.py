"""Products at even shares and at those in force, timed in turn, on a clock that counts multiplications."""

import pytest
from helpers.processes import for_each, instances_of
from helpers.virtual_training import Run

from zeroresize.measure import rank_monitor
from zeroresize.measure.rank_monitor import RankMonitor
from zeroresize.measure.timed_products import compare_products, time_reference

pytestmark = pytest.mark.same_ranks


def monitored(group):
    with instances_of(RankMonitor) as monitors:
        run = Run(group, gather_s=0.0, mode="off", update_every=4)
    return run, monitors[0]


def test_the_ratio_is_the_share_that_a_rank_owns_at_any_speed_and_a_reference_tells_a_whole_step(run_ranks):
    @for_each([(1.0,), (7.0,)])
    def train(rank, group, chi):
        run, monitor = monitored(group)
        assert compare_products(monitor._layers, {}) is None, "what saw no tokens is not compared"
        run.updates(2)
        by_reference = time_reference(monitor._layers, monitor.state.num_tokens) / monitor.times.gemm_s
        run.balancer.move((3, 1))
        run.time.chi = chi
        return by_reference, compare_products(monitor._layers, monitor.state.num_tokens)

    for of_rank, ratio in zip(run_ranks(train, 2), (1.5, 0.5), strict=True):
        for by_reference, compared in of_rank:
            assert by_reference == pytest.approx(1.2, rel=1e-2), "steps leave out the first layer's dgrad"
            assert compared == pytest.approx(ratio, rel=1e-3)


def test_a_rank_that_owns_nothing_is_seen_to_become_slow_and_to_recover(run_ranks):
    """By a reference product at every update, since it has no products of its own."""

    def train(rank, group):
        run, monitor = monitored(group)
        run.updates(3)
        run.balancer.move((1, 0))
        believed = []
        for chi in (1.0, 5.0, 1.0):
            run.time.chi = chi if rank == 1 else 1.0
            run.updates(3)
            believed.append(monitor.times.gemm_s)
        return believed

    _, (before, slow, after) = run_ranks(train, 2)
    assert slow / before == pytest.approx(5.0, rel=0.2)
    assert after / before == pytest.approx(1.0, rel=0.2)


def test_what_cannot_be_compared_on_one_rank_holds_up_nobody(run_ranks):
    @for_each([((3, 1),), ((1, 0),)])
    def train(rank, group, shares):
        run, _ = monitored(group)
        run.updates(2)

        def fail(*_):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1e12 bytes")

        if rank == 1:
            rank_monitor.compare_products = rank_monitor.time_reference = fail
        run.balancer.move(shares)
        run.updates(2)
        return run.balancer.plan.owned

    assert run_ranks(train, 2, timeout_s=40) == [[(1.5, 0.5), (2.0, 0.0)]] * 2
