"""What links take is measured once, alike on all ranks."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from zeroresize.comm.collectives import start_messages
from zeroresize.measure import links
from zeroresize.measure.links import measure_messages
from zeroresize.policy.moves.move_cost import MoveCost

CPU = torch.device("cpu")
LATENCY_S, PER_BYTE_S = 0.002, 5e-9


def test_the_slowest_link_counts_on_every_rank_and_a_freak_does_not(run_ranks, monkeypatch):
    """Rank 1 has a link of 200 MB/s and a latency of 2 ms; one of its messages is held up for a quarter of a second."""

    def check(rank, group):
        num_messages = 0

        def slowed(sends, receives, *others):
            nonlocal num_messages
            num_messages += 1
            (tensor,) = sends.values()
            if rank == 1:
                time.sleep(LATENCY_S + PER_BYTE_S * tensor.nbytes + (0.25 if num_messages == 6 else 0.0))
            return start_messages(sends, receives, *others)

        monkeypatch.setattr(links, "start_messages", slowed)
        return measure_messages(group, CPU)

    first, *others = run_ranks(check, 3)
    assert others == [first] * 2
    assert PER_BYTE_S < first.seconds_per_byte < 2.5 * PER_BYTE_S
    assert LATENCY_S <= first.fixed_s < 0.02


def test_a_rank_by_itself_has_no_links(run_ranks):
    assert run_ranks(lambda rank, group: measure_messages(group, CPU), 1) == [MoveCost(0.0, 0.0)]


def test_a_rank_that_does_not_come_is_waited_for_until_the_time_limit_only(run_ranks):
    def check(rank, group):
        short = dist.new_group(timeout=timedelta(seconds=0.5))
        began = time.monotonic()
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"ranks \[1\] of the group .* time limit"):
                measure_messages(short, CPU)
        seconds = time.monotonic() - began
        dist.barrier(group)
        return seconds

    assert run_ranks(check, 2)[0] < 10.0
