"""A balancer in mode "off" logs who is slow, by the code of zr.watch, and has the same metrics."""

import time

import pytest
from helpers.processes import caught_log_lines
from helpers.virtual_training import Run


def wait_for_numbers(run):
    deadline = time.monotonic() + 20.0
    while run.balancer._parts.observer.slowness.is_waiting and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.slow
def test_beginning_and_end_are_told_once_by_one_rank_and_nothing_is_balanced(run_ranks):
    def train(rank, group):
        with caught_log_lines() as lines:
            run = Run(group, mode="off", update_every=5)
            for chi in (1.0, 3.0, 1.0):
                run.time.chi = chi if rank == 1 else 1.0
                for _ in range(8):
                    run.updates(1)
                    wait_for_numbers(run)
                if chi > 1.0:
                    metrics = run.balancer.metrics()
            after = run.balancer.metrics()
            run.balancer.close()
        return [line for line in lines if "slower" in line], metrics, after

    (lines, metrics, after), (lines_there, metrics_there, _) = run_ranks(train, 2)
    assert lines_there == []
    begins, ends = lines
    assert "rank 1 is " in begins and "slow since step 40" in begins and "its matrix products take longer" in begins
    assert "rank 1 is as fast as the others again" in ends
    assert metrics["watch/num_slow"] == 1.0 and metrics["watch/score"] == 1.0 and metrics["watch/slower"] == 1.0
    assert metrics_there["watch/slower"] > 1.3 and metrics_there["watch/score"] < 0.8
    assert metrics["watch/cost_s"] == pytest.approx(metrics_there["watch/cost_s"])
    assert after["watch/num_slow"] == 0.0 and after["watch/cost_s"] >= metrics["watch/cost_s"] > 0.0
    assert metrics["balance/relieved"] == 0.0


def test_other_modes_have_no_such_numbers(run_ranks):
    def train(rank, group):
        run = Run(group)
        run.updates(1)
        return [name for name in run.balancer.metrics() if name.startswith("watch/")]

    assert run_ranks(train, 2) == [[], []]
