"""What links take is measured once, alike on all ranks."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.processes import for_each

from zeroresize.comm.collectives import start_messages
from zeroresize.measure import links
from zeroresize.measure.links import measure_messages, measure_neighbour_links
from zeroresize.policy.moves.move_cost import MoveCost

CPU = torch.device("cpu")
LATENCY_S, PER_BYTE_S = 0.002, 5e-9


def slow_down(seconds_of):
    """Let messages to a peer wait for so many seconds before they are sent."""

    def slowed(sends, receives, *others):
        for peer, tensor in sends.items():
            time.sleep(seconds_of(peer, tensor.nbytes))
        return start_messages(sends, receives, *others)

    links.start_messages = slowed


def test_the_slowest_link_counts_on_every_rank_and_a_freak_does_not(run_ranks):
    """Rank 1 has a link of 200 MB/s and a latency of 2 ms; one of its messages is held up for a quarter of a second."""

    def check(rank, group):
        freaks = iter([0.0] * 5 + [0.25] + [0.0] * 100)
        slow_down(lambda _, num_bytes: LATENCY_S + PER_BYTE_S * num_bytes + next(freaks) if rank == 1 else 0.0)
        return measure_messages(group, CPU)

    first, *others = run_ranks(check, 3)
    assert others == [first] * 2
    assert PER_BYTE_S < first.seconds_per_byte < 2.5 * PER_BYTE_S
    assert LATENCY_S <= first.fixed_s < 0.02


def test_a_rank_by_itself_has_no_links(run_ranks):
    assert run_ranks(lambda rank, group: (measure_messages(group, CPU), measure_neighbour_links(group, CPU)), 1) == [
        (MoveCost(0.0, 0.0), ())
    ]


def test_a_slow_link_between_two_neighbours_is_known_by_itself_on_every_rank(run_ranks):
    """In one direction of one link messages take 50 ms and 50 ns a byte more; both directions count by their mean."""
    latency_s, per_byte_s = 0.05, 50e-9
    cases = [(0, False), (1, True), (2, False)]

    @for_each(cases)
    def check(rank, group, slow, is_back):
        link = (slow + 1, slow) if is_back else (slow, slow + 1)
        slow_down(lambda peer, num_bytes: latency_s + per_byte_s * num_bytes if (rank, peer) == link else 0.0)
        return measure_neighbour_links(group, CPU, num_bytes=2**20)

    of_first, *of_others = run_ranks(check, 4)
    assert of_others == [of_first] * 3
    for (slow, _), measured in zip(cases, of_first, strict=True):
        assert latency_s / 2 <= measured[slow].fixed_s < latency_s
        assert measured[slow].seconds(2**20) >= (latency_s + per_byte_s * 2**20) / 2
        for boundary in {0, 1, 2} - {slow}:
            assert measured[boundary].fixed_s < latency_s / 2
            assert measured[boundary].seconds(2**20) < measured[slow].seconds(2**20)


def test_who_does_not_come_is_waited_for_until_the_time_limit_and_a_small_message_is_refused(run_ranks):
    def check(rank, group):
        with pytest.raises(ValueError, match="num_bytes=1024 is not allowed"):
            measure_neighbour_links(group, CPU, num_bytes=1024)
        for absent, measure in ((1, measure_messages), (1, measure_neighbour_links)):
            short = dist.new_group(timeout=timedelta(seconds=0.5))
            began = time.monotonic()
            if rank != absent:
                with pytest.raises(RuntimeError, match=r"time limit"):
                    measure(short, CPU)
            assert time.monotonic() - began < 10.0
            dist.barrier(group)

    run_ranks(check, 3, timeout_s=30)
