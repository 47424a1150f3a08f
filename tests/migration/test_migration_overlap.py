"""What migration sends travels while other layers compute: the order of starts, products and waits, without a clock."""

import functools
import itertools
import queue
import threading

import pytest
import torch
import torch.distributed as dist
from helpers.parallel_layers import PAIR_IN, Pair, equal_loans, lend, randn

from zeroresize.config.keys import MIGRATION_TRANSPORTS
from zeroresize.kernels.probe import ProductProbe
from zeroresize.migration import transport
from zeroresize.migration.layer_loans import LayerLoans
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


class Queue:
    """Does what it is given one after the other, in a thread of its own."""

    def __init__(self):
        self.tasks = queue.SimpleQueue()
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            self.tasks.get()()


class Done:
    """A ``Work`` that a queue does."""

    def __init__(self, task):
        self.task, self.done = task, threading.Event()

    def __call__(self):
        self.task()
        self.done.set()

    def wait(self):
        self.done.wait()


class Queues:
    """Transfers begin when those before them have ended, as on NCCL's stream a group, and gloo's connections.

    One queue for a group's collectives, and one for what goes to, and comes from, each other rank of it.

    Args:
        held: names of the layers whose lent weights do not leave their owner before :meth:`let_go`, or ``limit_s``.
    """

    def __init__(self, monkeypatch, held, limit_s):
        self.queues, self.gate, self.limit_s = {}, threading.Event(), limit_s
        self.is_held, self.num_held, self.was_in_time = False, 0, True
        for kind in (dist.ProcessGroup, dist.ProcessGroupGloo):
            for name, is_to_one in (("allreduce", False), ("broadcast", False), ("reduce", False), ("send", True)):
                monkeypatch.setattr(kind, name, self.queued(getattr(kind, name), name if is_to_one else "collective"))
            monkeypatch.setattr(kind, "recv", self.queued(kind.recv, "recv"))
        send_weights = LayerLoans.send_weights

        def send(loans):
            self.is_held = loans.lends and loans.name in held
            try:
                send_weights(loans)
            finally:
                self.is_held = False

        monkeypatch.setattr(LayerLoans, "send_weights", send)

    def let_go(self):
        self.gate.set()

    def queued(self, start, kind):
        def call(group, *args):
            is_held, peer = self.is_held, None if kind == "collective" else args[1]
            self.num_held += is_held

            def transfer():
                if is_held and not self.gate.wait(self.limit_s):
                    self.was_in_time = False
                start(group, *args).wait()

            done = Done(transfer)
            self.queues.setdefault((id(group), kind, peer), Queue()).tasks.put(done)
            return done

        return call


@pytest.mark.parametrize("migration_transport", MIGRATION_TRANSPORTS)
def test_first_layers_do_not_wait_for_the_weights_of_the_last(run_ranks, monkeypatch, migration_transport):
    """Those of the second pair are on their way when the first pair's output is there."""

    num_ranks, owner = 3, 1

    def train(rank, group):
        model = Pair(group, torch.float64)
        queues = Queues(monkeypatch, held="23", limit_s=2.0)
        lend(model.layers(), group, equal_loans({owner: 0.5}, num_ranks), migration_transport)
        x = randn(5, PAIR_IN, dtype=torch.float64)
        for layers in (model.whole, model.parallel):
            y = model.run(layers[:2], x)
            if layers is model.parallel:
                queues.let_go()
            model.run(layers[2:], y).square().mean().backward()
        return queues.num_held, queues.was_in_time, model.worst_error(group)

    for rank, (num_held, was_in_time, error) in enumerate(run_ranks(train, num_ranks)):
        assert (num_held >= 2) == (rank == owner)
        assert was_in_time and error <= 1e-10
