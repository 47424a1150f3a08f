"""Ranks meet with as many numbers as each has, and no rank waits for numbers that others do not send."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.comm.exchange import Exchange, gather
from zeroresize.comm.groups import CpuGroup
from zeroresize.resharding.agreement import meet_over


class Ranks:
    """Ranks that run one after another, again and again until each has got what the others send."""

    def __init__(self, values):
        self.values, self.sent = values, [[] for _ in values]

    def gathered(self):
        """What every rank gathers in the end."""
        while True:
            before = [list(sent) for sent in self.sent]
            tables = [self._gathered(rank) for rank in range(len(self.values))]
            if self.sent == before:
                return tables

    def _gathered(self, rank):
        sent_now = []

        def exchange(numbers):
            at = len(sent_now)
            sent_now.append(list(numbers))
            others = [sent[at] if len(sent) > at else [0.0] * len(numbers) for sent in self.sent]
            return [*others[:rank], sent_now[at], *others[rank + 1 :]]

        table = gather(self.values[rank], exchange)
        self.sent[rank] = sent_now
        return table


@given(st.lists(st.lists(st.floats(allow_nan=False), max_size=9), min_size=1, max_size=4))
def test_every_rank_gets_the_values_of_all_by_exchanges_of_one_length(values):
    ranks = Ranks(values)
    assert ranks.gathered() == [values] * len(values)
    lengths = {tuple(map(len, sent)) for sent in ranks.sent}
    assert len(lengths) == 1 and len(*lengths) <= 2


def test_few_numbers_take_one_exchange():
    ranks = Ranks([[1.0, 2.0, 3.0, 4.0], [], [5.0]])
    ranks.gathered()
    assert [len(sent) for sent in ranks.sent] == [1, 1, 1]


def test_ranks_may_give_different_numbers_over_real_groups_and_the_rest_counts_as_zeros(run_ranks):
    def check(rank, group):
        exchange = Exchange(CpuGroup(group, {}))
        for meet in (meet_over(group, torch.device("cpu")), exchange.meet):
            assert meet(*range(rank + 1)) == [[*range(other + 1), *[0.0] * (rank - other)] for other in range(3)]
            assert meet() == [[], [], []]
        values = [float(rank)] * 5 * rank
        assert exchange.gather(values) == [[float(other)] * 5 * other for other in range(3)]

    run_ranks(check, 3)
