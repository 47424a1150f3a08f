"""What links take is measured once, alike on all ranks."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from zeroresize.comm.collectives import start_messages
from zeroresize.measure import links
from zeroresize.measure.links import measure_messages, measure_neighbour_links
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


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("is_back", [False, True])
def test_a_slow_link_between_two_neighbours_is_known_by_itself_on_every_rank(run_ranks, monkeypatch, slow, is_back):
    """In one direction of one link messages take 50 ms and 50 ns a byte more; both directions count by their mean."""
    latency_s, per_byte_s = 0.05, 50e-9

    def check(rank, group):
        def slowed(sends, receives, *others):
            for peer, tensor in sends.items():
                if (rank, peer) == ((slow + 1, slow) if is_back else (slow, slow + 1)):
                    time.sleep(latency_s + per_byte_s * tensor.nbytes)
            return start_messages(sends, receives, *others)

        monkeypatch.setattr(links, "start_messages", slowed)
        return measure_neighbour_links(group, CPU, num_bytes=2**20)

    first, *others = run_ranks(check, 4)
    assert others == [first] * 3 and len(first) == 3
    assert latency_s / 2 <= first[slow].fixed_s < latency_s
    assert first[slow].seconds(2**20) >= (latency_s + per_byte_s * 2**20) / 2
    for boundary in {0, 1, 2} - {slow}:
        assert first[boundary].fixed_s < latency_s / 2
        assert first[boundary].seconds(2**20) < first[slow].seconds(2**20)


def test_neighbours_of_a_rank_by_itself_have_no_links(run_ranks):
    assert run_ranks(lambda rank, group: measure_neighbour_links(group, CPU), 1) == [()]


def test_a_message_too_small_to_tell_what_bytes_take_is_refused_on_every_rank(run_ranks):
    def check(rank, group):
        with pytest.raises(ValueError, match="num_bytes=1024 is not allowed"):
            measure_neighbour_links(group, CPU, num_bytes=1024)

    run_ranks(check, 2)


def test_a_neighbour_that_does_not_come_is_waited_for_until_the_time_limit_only(run_ranks):
    def check(rank, group):
        short = dist.new_group(timeout=timedelta(seconds=0.5))
        if rank != 1:
            with pytest.raises(RuntimeError, match="time limit"):
                measure_neighbour_links(short, CPU)
        dist.barrier(group)

    run_ranks(check, 3, timeout_s=30)
