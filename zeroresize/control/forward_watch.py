"""What is noticed in forwards: batches that differ between the ranks, of ``T`` tokens."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping

from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import explain
from zeroresize.comm.exchange import Exchange
from zeroresize.comm.words import Call
from zeroresize.layers.balanced_linear import BalancedLinear


class ForwardWatch:
    """Compares the ranks' T wherever it changes on this rank, unless ``compares`` is False.

    Ranks with unequal batches would send each other unequally much, which ends a process (gloo) or hangs (NCCL). So a
    layer whose T changes meets the other ranks before it sends anything; where T stays as it is, nothing is exchanged.
    One layer meets for all after it that change alike in the same forward of the model. Models that are compiled are
    not watched.

    Where T changes on some ranks only, these wait, and the others wait for them in the layer's collective. After some
    seconds a thread looks why, and comes for them: so all ranks learn all T. Waits that cannot be interrupted (for one
    rank's message, or on a GPU) raise it when they end; until then the log tells. In ``groups``, those of the layers'
    collectives, long waits and errors are explained.
    """

    def __init__(
        self,
        layers: Mapping[str, BalancedLinear],
        exchange: Exchange,
        *,
        compares: bool,
        groups: Iterable[ProcessGroup] = (),
    ) -> None:
        self._layers, self._exchange, self._names, self._compares = layers, exchange, list(layers), compares
        self._tokens: dict[str, int] = {}
        self._met: tuple[str, int | None, int] | None = None  # the last layer that did, its T before and then
        self._num_calls = self._num_met = 0  # alike on all ranks, as all layers are collective
        self._comparing = threading.Lock()
        for name, layer in layers.items():
            layer.watch_forward = _calling(weakref.ref(self), name)
        for group in groups:
            explain(group, exchange.words)
        exchange.words.come = weakref.WeakMethod(self._come_if_awaited)

    def forward(self, name: str, num_tokens: int) -> None:
        """Compare the ranks' T: layer ``name`` is about to compute T tokens.

        Raises:
            ValueError: on every rank, if their T differ; where T changes on some only, the others' collective raises
                it.
            RuntimeError: if a rank does not come.
        """
        if self._compares:
            if self._met is not None and self._met[0] == name:  # another forward of the model
                self._met = None
            before = self._tokens.get(name)
            if num_tokens != before:
                if self._met is None or self._met[1:] != (before, num_tokens):  # else a layer before has met for it
                    with self._comparing:
                        self._exchange.words.raise_met()
                        self._meet(name, num_tokens)
                    self._met = name, before, num_tokens
                self._tokens[name] = num_tokens
        self._num_calls += 1  # only now has this rank passed the comparison
        self._exchange.words.moved()

    def close(self) -> None:
        """Watch nothing any more."""
        self._compares = False
        for layer in self._layers.values():
            layer.watch_forward = None

    def _come_if_awaited(self, num_met: int, call: int, name: str) -> None:
        """In a thread: where another rank waits to compare a T that has not changed here, come to it.

        It has met so often, this time included, in the layer of that name and number among all that it has called.
        """
        if self._compares and self._comparing.acquire(blocking=False):
            try:
                if num_met > self._num_met and call <= self._num_calls:
                    self._meet(name, self._tokens.get(name, 0))
            except ValueError as error:
                self._exchange.words.raise_later(error)
            finally:
                self._comparing.release()

    def _meet(self, name: str, num_tokens: int) -> None:
        where, words = self._exchange.where, self._exchange.words
        call, where.call = where.call, Call.FORWARD
        where.batch = f"{num_tokens} tokens in layer {name}, {self._tokens.get(name, 'none')} before"
        self._num_met += 1
        words.meeting = self._num_met, self._num_calls + 1, name
        try:
            table = self._exchange.meet(num_tokens, self._names.index(name))
        finally:
            where.call, words.meeting = call, None
        if any(row != table[0] for row in table):
            counts_by_rank = "; ".join(
                f"rank {rank}: {tokens:.0f} tokens in layer {self._names[int(layer)]}"
                for rank, (tokens, layer) in enumerate(table)
            )
            raise ValueError(
                f"the ranks of the group were given different batches: {counts_by_rank}; every rank of a "
                "tensor-parallel group must be given the same batch"
            )


def _calling(watch: weakref.ref[ForwardWatch], name: str) -> Callable[[int, bool], None]:
    def forward(num_tokens: int, training: bool) -> None:
        alive = watch()
        if alive is not None:
            alive.forward(name, num_tokens)

    return forward
