"""What migration sends travels while other layers compute: the order of starts, products and waits, without a clock."""

import functools
import itertools

import pytest
import torch
from parallel_layers import randn
from test_migration import IN, Pair, equal_loans, lend

from zeroresize.config import MIGRATIONS
from zeroresize.migration import broadcast_reduce, carrier
from zeroresize.migration.broadcast_reduce import BroadcastReduce
from zeroresize.migration.carrier import Carrier
from zeroresize.migration.scatter_gather import ScatterGather
from zeroresize.probe import Probe

LAYERS = "0123"  # two pairs of a column- and a row-parallel layer, in the order of the forward


class Products(Probe):
    """Logs ``("product", layer)`` for every product, own or borrowed."""

    def __init__(self, log, layer):
        self.log, self.layer = log, layer

    def product_begins(self):
        self.log.append(("product", self.layer))


class Transfers:
    """Logs ``("start w", layer)`` and ``("wait w", layer)``, the same with dw, whoever starts and whoever waits."""

    def __init__(self, log, monkeypatch):
        self.log, self.what = log, None
        for kind, method in ((BroadcastReduce, "send_slice"), (ScatterGather, "send_slice"), (Carrier, "send_home")):
            monkeypatch.setattr(kind, method, self.named(getattr(kind, method)))
        for name in ("start_send", "start_receive"):
            monkeypatch.setattr(carrier, name, self.started(getattr(carrier, name)))
        monkeypatch.setattr(broadcast_reduce, "start_broadcast", self.started(broadcast_reduce.start_broadcast))

    def named(self, method):
        @functools.wraps(method)
        def call(*args):
            what, layer, *_ = args[-1]
            self.what = (what, layer) if what in ("w", "dw") else None
            try:
                return method(*args)
            finally:
                self.what = None

        return call

    def started(self, start):
        @functools.wraps(start)
        def call(*args):
            works = start(*args)
            if self.what is None:
                return works
            what, layer = self.what
            self.log.append((f"start {what}", layer))
            if isinstance(works, list):
                return [Waited(work, self.log, (f"wait {what}", layer)) for work in works]
            return Waited(works, self.log, (f"wait {what}", layer))

        return call


class Waited:
    """A ``Work`` that logs when it is waited for."""

    def __init__(self, work, log, event):
        self.work, self.log, self.event = work, log, event

    def wait(self):
        self.log.append(self.event)
        return self.work.wait()


OWNERS = [(2, [0]), (3, [1]), (3, [0, 2])]  # of so many ranks


@pytest.fixture(params=itertools.product(MIGRATIONS, OWNERS), ids=str)
def logs(request, run_ranks, monkeypatch):
    """``(before and in forward, in backward)`` of every rank, when the owners lend half of their columns."""
    migrate, (num_ranks, owners) = request.param

    def train(rank, group):
        log = []
        Transfers(log, monkeypatch)
        model = Pair(group, torch.float64)
        for name, layer in model.layers().items():
            layer.probes.add_outermost(Products(log, name))
        lend(model.layers(), group, equal_loans(dict.fromkeys(owners, 0.5), num_ranks), migrate)
        loss = model.run(model.parallel, randn(5, IN, dtype=torch.float64)).square().mean()
        forward = log.copy()
        log.clear()
        loss.backward()
        return forward, log

    return run_ranks(train, num_ranks)


def first(log, event):
    """Where ``event`` stands first in the log, beyond its end if nowhere."""
    return log.index(event) if event in log else len(log)


def last(log, event):
    return len(log) - 1 - log[::-1].index(event)


def test_weights_of_all_layers_travel_before_the_first_product_and_none_is_waited_for_before_its_layer(logs):
    for forward, backward in logs:
        begins = min(first(forward, ("product", layer)) for layer in LAYERS)
        for layer in LAYERS:
            assert last(forward, ("start w", layer)) < begins
            assert ("wait w", layer) in forward + backward
        for before, layer in itertools.pairwise(LAYERS):
            assert first(forward, ("wait w", layer)) > last(forward, ("product", before))


def test_gradients_of_lent_columns_travel_while_earlier_layers_go_back_and_none_is_waited_for_before_all_have(logs):
    for _, backward in logs:
        ends = max(last(backward, ("product", layer)) for layer in LAYERS)
        for layer in LAYERS:
            assert ends < first(backward, ("wait dw", layer)) < len(backward)
        for before, layer in itertools.pairwise(LAYERS):
            assert last(backward, ("start dw", layer)) < first(backward, ("product", before))
