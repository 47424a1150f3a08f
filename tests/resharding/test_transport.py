"""Rounds of messages: all arrive, in buffers that take turns, and a failure holds up no rank that lives."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.on_ranks import on_ranks

from zeroresize.comm.groups import CpuGroup
from zeroresize.resharding.parcels import End, Parcel, RankRounds
from zeroresize.resharding.transport import Transport

SIZE = 5
#: Rank 0 sends to both others, rank 1 to itself and to rank 2, and so on: by round.
ROUNDS = [[(0, 1), (0, 2), (1, 1)], [(1, 2), (2, 0)], [(2, 1)], [(0, 1), (1, 0), (2, 2)]]
#: Every parcel has a turn of its own round.
PARCELS = [Parcel((pair,), SIZE, 1, torch.uint8, number) for number, pairs in enumerate(ROUNDS) for pair in pairs]


def received_by(rank):
    """The parcels in the order in which they come; a rank's own counts."""
    return [number for number, parcel in enumerate(PARCELS) if parcel.routes[0][1] == rank]


class Ring:
    """This rank's part: every byte tells its parcel."""

    def __init__(self, group, max_bytes=1000, packs_not=None, unpacks_not=None):
        self.rank, self.unpacked, self.meanwhile = dist.get_rank(group), [], 0
        self.packs_not, self.unpacks_not = packs_not, unpacks_not
        self.transport = Transport(RankRounds.of(PARCELS, self.rank, max_bytes), group)
        self.transport.allocate(torch.device("cpu"))
        self.received = torch.zeros(len(PARCELS), SIZE, dtype=torch.uint8)

    def carry_out(self, over=None):
        failure = self.transport.carry_out(self.source_of, self.target_of, meanwhile=self.count, over=over)
        for number in received_by(self.rank):
            assert failure or (self.received[number] == 1 + number).all()
        return failure

    def count(self):
        self.meanwhile += 1

    def source_of(self, number):
        assert PARCELS[number].routes[0][0] == self.rank
        if self.packs_not == PARCELS[number].turn:
            raise ValueError("cannot be packed")
        return End(torch.full((1, SIZE, 1), 1 + number, dtype=torch.uint8))

    def target_of(self, number):
        if self.unpacks_not == PARCELS[number].turn:
            raise ValueError("cannot be read")
        if not self.unpacked or self.unpacked[-1] != number:
            self.unpacked.append(number)
        return End(self.received[number].view(1, SIZE, 1))


@on_ranks(3, [[1], [2 * SIZE], [1000]])
def test_every_parcel_arrives_once_in_the_order_of_the_rounds(rank, group, max_bytes):
    for over in (None, CpuGroup(group, {})):
        ring = Ring(group, max_bytes)
        assert ring.carry_out(over) is None
        assert sorted(set(ring.unpacked)) == received_by(rank)
        assert ring.meanwhile == 1
        assert ring.transport.num_rounds >= len(ROUNDS) and 0 < ring.transport.buffer_bytes <= max_bytes
        flat = [pair for pairs in ROUNDS for pair in pairs]
        assert ring.transport.sent_bytes == SIZE * sum(pair[0] == rank != pair[1] for pair in flat)
        assert ring.transport.received_bytes == SIZE * sum(pair[1] == rank != pair[0] for pair in flat)


def test_parcels_are_cast_and_added_in_the_order_that_is_given(run_ranks):
    """Where some stays here and comes from two others, floats are added in one order on all ranks."""
    values = [torch.tensor([[[value], [2 * value]]], dtype=torch.float64) for value in (1e16, 1.0, -1e16)]

    def check(rank, group):
        routes = tuple((source, destination) for source in range(3) for destination in range(3))
        transport = Transport(RankRounds.of([Parcel(routes, 2, 1, torch.float32)], rank, 8, [2, 0, 1]), group)
        transport.allocate(torch.device("cpu"))
        total = torch.zeros(1, 2, 1, dtype=torch.float64)
        assert transport.carry_out(lambda _: End(values[rank]), lambda _: End(total, adds=True)) is None
        return total.flatten().tolist()

    cast = [value.to(torch.float32).double() for value in values]
    expected = torch.zeros(1, 2, 1, dtype=torch.float64).add_(cast[1]).add_(cast[2]).add_(cast[0])
    assert run_ranks(check, 3) == [expected.flatten().tolist()] * 3


@on_ranks(3, [[{"unpacks_not": 0}, "cannot be read"], [{"packs_not": 1}, "cannot be packed"]])
def test_after_a_failure_the_other_rounds_are_carried_out_and_nobody_waits(rank, group, fault, expected):
    ring = Ring(group, **fault if rank == 1 else {})
    begin = time.perf_counter()
    failure = ring.transport.carry_out(ring.source_of, ring.target_of)
    assert time.perf_counter() - begin < 5.0
    assert str(failure) == (expected if rank == 1 else "None")
    left_out = fault.get("unpacks_not") if rank == 1 else None
    assert ring.unpacked == [number for number in received_by(rank) if PARCELS[number].turn != left_out]


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_by_each_that_waits_for_it(run_ranks):
    def check(rank, group):
        own_group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))
        ring = Ring(own_group)
        if rank == 1:
            time.sleep(3.0)
            return None
        return str(ring.carry_out())

    texts = run_ranks(check, 3)
    assert all("ranks [1] of the group" in texts[rank] for rank in (0, 2)), texts
