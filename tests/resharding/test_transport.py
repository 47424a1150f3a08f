"""Rounds of messages: all arrive, in buffers that take turns, and a failure holds up no rank that lives."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from zeroresize.comm.cpu_group import CpuGroup
from zeroresize.resharding.transport import RoundTransport

SIZE = 5
#: Rank 0 sends to both others, rank 1 to itself and to rank 2, and so on: by round.
ROUNDS = [[(0, 1), (0, 2), (1, 1)], [(1, 2), (2, 0)], [(2, 1)], [(0, 1), (1, 0), (2, 2)], []]


def received_by(rank):
    """By round; a rank's own message counts."""
    return [(number, pair) for number, pairs in enumerate(ROUNDS) for pair in pairs if pair[1] == rank]


class Ring:
    """This rank's part: every byte of a message tells its round and its pair."""

    def __init__(self, group, at_once=2, packs_not=None, unpacks_not=None):
        self.rank, self.unpacked, self.places, self.meanwhile = dist.get_rank(group), [], set(), 0
        self.packs_not, self.unpacks_not = packs_not, unpacks_not
        self.transport = RoundTransport(list(enumerate(ROUNDS)), self.sizes_of, group, at_once)
        self.transport.allocate(torch.device("cpu"))

    def carry_out(self, over=None):
        return self.transport.carry_out(self.pack, self.unpack, meanwhile=self.count, over=over)

    def count(self):
        self.meanwhile += 1

    def sizes_of(self, round_):
        return {pair: SIZE if pair[0] != pair[1] else 0 for pair in round_[1] if self.rank in pair}

    def pack(self, message, round_, pair):
        assert pair[0] == self.rank != pair[1]
        if self.packs_not == round_[0]:
            raise ValueError("cannot be packed")
        self.places.add(message.untyped_storage().data_ptr())
        message.fill_(1 + 9 * round_[0] + 3 * pair[0] + pair[1])

    def unpack(self, message, round_, pair):
        if self.unpacks_not == round_[0]:
            raise ValueError("cannot be read")
        if pair[0] != pair[1]:
            assert (message == 1 + 9 * round_[0] + 3 * pair[0] + pair[1]).all()
        self.unpacked.append((round_[0], pair))


@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_every_message_arrives_once_in_the_order_of_the_rounds(run_ranks, at_once):
    def check(rank, group):
        for over in (None, CpuGroup(group, {})):
            ring = Ring(group, at_once)
            assert ring.carry_out(over) == []
            assert ring.unpacked == received_by(rank)
            assert ring.meanwhile == 1
            assert 0 < len(ring.places) <= at_once and (at_once > 1 or len(ring.places) == 1)
            assert ring.transport.num_rounds == len(ROUNDS)
            assert ring.transport.buffer_bytes == min(at_once, len(ROUNDS)) * (16 + SIZE)  # two messages, aligned
            flat = [pair for pairs in ROUNDS for pair in pairs]
            assert ring.transport.sent_bytes == SIZE * sum(pair[0] == rank != pair[1] for pair in flat)
            assert ring.transport.received_bytes == SIZE * sum(pair[1] == rank != pair[0] for pair in flat)

    run_ranks(check, 3)


def test_after_a_failure_the_other_rounds_are_carried_out_all_the_same(run_ranks):
    def check(rank, group):
        ring = Ring(group, unpacks_not=0 if rank == 1 else None)
        begin = time.perf_counter()
        errors = ring.carry_out()
        assert time.perf_counter() - begin < 5.0
        assert [str(error) for error in errors] == (["cannot be read"] if rank == 1 else [])
        assert ring.unpacked == [(number, pair) for number, pair in received_by(rank) if rank != 1 or number > 0]

    run_ranks(check, 3)


def test_a_rank_that_cannot_pack_lets_nobody_wait(run_ranks, monkeypatch):
    def check(rank, group):
        ring = Ring(group, packs_not=1 if rank == 1 else None)
        begin = time.perf_counter()
        errors = ring.carry_out()
        assert time.perf_counter() - begin < 5.0
        assert [str(error) for error in errors] == (["cannot be packed"] if rank == 1 else [])

    monkeypatch.setattr(Ring, "unpack", lambda *_: None)  # one message is of no use
    run_ranks(check, 3)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_by_each_that_waits_for_it(run_ranks):
    def check(rank, group):
        own_group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))
        ring = Ring(own_group)
        if rank == 1:
            time.sleep(3.0)
            return None
        errors = ring.carry_out()
        return [str(error) for error in errors]

    for texts in (run_ranks(check, 3)[rank] for rank in (0, 2)):
        assert any("ranks [1] of the group" in text for text in texts), texts
