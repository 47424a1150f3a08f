"""Rounds of messages: all arrive, in buffers that take turns, and a failure holds up no rank that lives."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from zeroresize.comm.cpu_group import CpuGroup
from zeroresize.resharding.message_rounds import MessageRounds

SIZE = 3
#: Rank 0 sends to both others, rank 1 to itself and to rank 2, and so on: by round.
ROUNDS = [[(0, 1), (0, 2), (1, 1)], [(1, 2), (2, 0)], [(2, 1)], [(0, 1), (1, 0), (2, 2)], []]


def received_by(rank):
    """By round; a rank's own message counts."""
    return [(number, pair) for number, pairs in enumerate(ROUNDS) for pair in pairs if pair[1] == rank]


class Ring:
    """This rank's part: every byte of a message tells its round and its pair."""

    def __init__(self, group, over=None, fails_at=None):
        self.rank, self.got, self.places, self.meanwhile, self.fails_at = dist.get_rank(group), [], [], 0, fails_at
        self.rounds = MessageRounds(group, self.pack, self.unpack, over)

    def carry_out(self, num_buffers):
        buffers = [torch.zeros(SIZE * 4, dtype=torch.uint8) for _ in range(num_buffers)]
        rounds = list(enumerate(ROUNDS))
        return self.rounds.carry_out(rounds, buffers, self.messages_of, self.count)

    def count(self):
        self.meanwhile += 1

    def messages_of(self, round_, buffer):
        _, pairs = round_
        own = [pair for pair in pairs if self.rank in pair]
        self.places.append(buffer.data_ptr())
        return {pair: buffer[at * SIZE : (at + 1) * SIZE] for at, pair in enumerate(own)}

    def pack(self, message, round_, pair):
        assert pair[0] == self.rank != pair[1]
        message.fill_(1 + 9 * round_[0] + 3 * pair[0] + pair[1])

    def unpack(self, message, round_, pair):
        if self.fails_at == round_[0]:
            raise ValueError("cannot be read")
        if pair[0] != pair[1]:
            assert (message == 1 + 9 * round_[0] + 3 * pair[0] + pair[1]).all()
        self.got.append((round_[0], pair))


@pytest.mark.parametrize("num_buffers", [1, 2, 4])
def test_every_message_arrives_once_in_the_order_of_the_rounds(run_ranks, num_buffers):
    def check(rank, group):
        for over in (None, CpuGroup(group, {})):
            ring = Ring(group, over)
            assert ring.carry_out(num_buffers) == []
            assert ring.got == received_by(rank)
            assert ring.meanwhile == 1
            assert len(set(ring.places)) == num_buffers
            flat = [pair for pairs in ROUNDS for pair in pairs]
            assert ring.rounds.sent_bytes == SIZE * sum(pair[0] == rank != pair[1] for pair in flat)
            assert ring.rounds.received_bytes == SIZE * sum(pair[1] == rank for pair in flat)

    run_ranks(check, 3)


def test_after_a_failure_the_other_rounds_are_carried_out_all_the_same(run_ranks):
    def check(rank, group):
        ring = Ring(group, fails_at=0 if rank == 1 else None)
        begin = time.perf_counter()
        errors = ring.carry_out(2)
        assert time.perf_counter() - begin < 5.0
        assert [str(error) for error in errors] == (["cannot be read"] if rank == 1 else [])
        assert ring.got == [(number, pair) for number, pair in received_by(rank) if rank != 1 or number > 0]

    run_ranks(check, 3)


def test_a_rank_that_does_not_come_is_named_by_each_that_waits_for_it(run_ranks):
    def check(rank, group):
        own_group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))
        ring = Ring(own_group)
        if rank == 1:
            time.sleep(3.0)
            return None
        errors = ring.carry_out(2)
        return [str(error) for error in errors]

    for told in (run_ranks(check, 3)[rank] for rank in (0, 2)):
        assert any("ranks [1] of the group" in text for text in told), told
