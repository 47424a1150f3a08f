"""What migration sends travels while other layers compute: the order of starts, products and waits, without a clock."""

import functools
import itertools

import pytest
import torch
from helpers.parallel_layers import PAIR_IN, Pair, equal_loans, lend, randn

from zeroresize.config.keys import MIGRATION_TRANSPORTS
from zeroresize.kernels.probe import ProductProbe
from zeroresize.migration import transport
from zeroresize.migration.transport import BroadcastReduce, ScatterGather, Transport

LAYERS = "0123"  # two pairs of a column- and a row-parallel layer, in the order of the forward


class Products(ProductProbe):
    """Logs ``("product", layer)`` for every product, own or borrowed."""

    def __init__(self, log, layer):
        self.log, self.layer = log, layer

    def product_begins(self):
        self.log.append(("product", self.layer))


class Transfers:
    """Logs ``("start w", layer)`` and ``("wait w", layer)``, the same with dw, whoever starts and whoever waits."""

    def __init__(self, log, monkeypatch):
        self.log, self.what = log, None
        for kind, method in (
            (BroadcastReduce, "send_slice"),
            (ScatterGather, "send_slice"),
            (Transport, "return_slice"),
        ):
            monkeypatch.setattr(kind, method, self.named(getattr(kind, method)))
        for name in ("start_send", "start_receive", "start_broadcast"):
            monkeypatch.setattr(transport, name, self.started(getattr(transport, name)))

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
            assert (args[-1] is not None) == (what == "w"), (
                "weights have a channel of their own: nothing waits behind them"
            )
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


def logs(run_ranks, monkeypatch, migration_transport, num_ranks, owners):
    """``(before and in forward, in backward)`` of every rank, when the owners lend half of their columns."""

    def train(rank, group):
        log = []
        Transfers(log, monkeypatch)
        model = Pair(group, torch.float64)
        for name, layer in model.layers().items():
            layer.probes.add_outermost(Products(log, name))
        lend(model.layers(), group, equal_loans(dict.fromkeys(owners, 0.5), num_ranks), migration_transport)
        loss = model.run(model.parallel, randn(5, PAIR_IN, dtype=torch.float64)).square().mean()
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


@pytest.mark.few(2)
@pytest.mark.parametrize(("migration_transport", "owners"), [*itertools.product(MIGRATION_TRANSPORTS, OWNERS)])
def test_what_is_lent_travels_while_other_layers_compute(run_ranks, monkeypatch, migration_transport, owners):
    """Weights of all layers start before the first product, and none is waited for before its layer; dw goes home while
    earlier layers go back, and none is waited for before all have."""
    for forward, backward in logs(run_ranks, monkeypatch, migration_transport, *owners):
        begins = min(first(forward, ("product", layer)) for layer in LAYERS)
        ends = max(last(backward, ("product", layer)) for layer in LAYERS)
        for layer in LAYERS:
            assert last(forward, ("start w", layer)) < begins
            assert ("wait w", layer) in forward + backward
            assert ends < first(backward, ("wait dw", layer)) < len(backward)
        for before, layer in itertools.pairwise(LAYERS):
            assert first(forward, ("wait w", layer)) > last(forward, ("product", before))
            assert last(backward, ("start dw", layer)) < first(backward, ("product", before))
