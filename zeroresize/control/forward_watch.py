"""What is noticed in forwards: batches that differ between ranks, and a ``balancer.step()`` that never comes.

``T`` tokens.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import explain
from zeroresize.comm.exchange import Exchange
from zeroresize.comm.words import Call
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.weight_checks import is_sharded_in
from zeroresize.utils.torch_private import version_of

logger = logging.getLogger(__name__)

#: Without a call of ``balancer.step()``, so many optimizer steps are a mistake.
FEW_STEPS = 10
#: Where weights do not tell steps, as frozen ones, so many training forwards before the first call are one.
MANY_FORWARDS = 1000


class ForwardWatch:
    """Compares the ranks' T wherever it changes on this rank, and warns once where no step is called.

    Ranks with unequal batches would send each other unequally much, which ends a process (gloo) or hangs (NCCL). So a
    layer whose T changes meets the other ranks before it sends anything; where T stays as it is, nothing is exchanged.
    One layer meets for all after it that change alike in the same forward of the model. Models that are compiled are
    not watched.

    Where T changes on some ranks only, these wait, and the others wait for them in the layer's collective. After some
    seconds a thread looks why, and comes for them: so all ranks learn all T. Waits that cannot be interrupted (for one
    rank's message, or on a GPU) raise it when they end; until then the log tells.

    Args:
        layers: balanced layers by name.
        exchange: with the other ranks.
        compares: whether batches are compared.
        groups: the process groups of the layers' collectives, whose long waits and errors are explained.
    """

    def __init__(
        self,
        layers: Mapping[str, BalancedLinear],
        exchange: Exchange,
        *,
        compares: bool,
        groups: Iterable[ProcessGroup] = (),
    ) -> None:
        self._layers, self._exchange, self._names = layers, exchange, list(layers)
        self._compares = compares
        self._tokens: dict[str, int] = {}
        self._met: tuple[str, int | None, int] | None = None  # the last layer that did, its T before and then
        # fully_shard makes its weights anew in every forward.
        self._tells_steps = not any(is_sharded_in(layer, layer.weight) for layer in layers.values())
        self._first = ""  # layer that trained, which stands for all of them
        self._seen_weight: tuple[int, int] | None = None
        self._num_changes = self._num_forwards = 0
        self._num_calls = self._num_met = 0  # alike on all ranks, as all layers are collective
        self._has_stepped = self._has_warned = False
        self._comparing = threading.Lock()
        for name, layer in layers.items():
            layer.watch_forward = _calling(weakref.ref(self), name)
        for group in groups:
            explain(group, exchange.words)
        exchange.words.come = weakref.WeakMethod(self._come_if_awaited)

    def step_is_called(self) -> None:
        """Note that ``balancer.step()`` is called."""
        self._num_changes = 0
        self._has_stepped = True

    def forward(self, name: str, num_tokens: int, training: bool) -> None:
        """Compare the ranks' T, and count the forward: layer ``name`` is about to compute T tokens.

        Raises:
            ValueError: on every rank, if their T differ; where T changes on some only, the others' collective raises
                it.
            RuntimeError: if a rank does not come.
        """
        if training and not self._has_warned and self._first in (name, ""):
            self._first = name
            self._expect_step(local_of(self._layers[name].weight))
        if self._compares:
            self._compare_if_changed(name, num_tokens)
        self._num_calls += 1  # only now has this rank passed the comparison
        self._exchange.words.moved()

    def _compare_if_changed(self, name: str, num_tokens: int) -> None:
        if self._met is not None and self._met[0] == name:  # another forward of the model
            self._met = None
        before = self._tokens.get(name)
        if num_tokens == before:
            return
        if self._met is None or self._met[1:] != (before, num_tokens):  # else a layer before this one has met for it
            self._compare(name, num_tokens)
            self._met = name, before, num_tokens
        self._tokens[name] = num_tokens

    def close(self) -> None:
        """Watch nothing any more."""
        self._compares = False
        for layer in self._layers.values():
            layer.watch_forward = None

    def _come_if_awaited(self, num_met: int, call: int, name: str) -> None:
        """In a thread: where another rank waits to compare a T that has not changed here, come to it.

        Args:
            num_met: how often the other rank has met, this time included.
            call: the layer's number among all that it has called.
            name: the layer's name.
        """
        if self._compares and self._comparing.acquire(blocking=False):
            try:
                if num_met > self._num_met and call <= self._num_calls:
                    self._meet(name, self._tokens.get(name, 0))
            except ValueError as error:
                self._exchange.words.raise_later(error)
            finally:
                self._comparing.release()

    def _compare(self, name: str, num_tokens: int) -> None:
        with self._comparing:
            self._exchange.words.raise_met()
            self._meet(name, num_tokens)

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

    def _expect_step(self, weight: Tensor) -> None:
        """A forward of training with ``weight``, which an optimizer step before it has changed."""
        seen, self._seen_weight = self._seen_weight, (version_of(weight), weight.data_ptr())
        self._num_changes += self._tells_steps and seen not in (None, self._seen_weight)
        self._num_forwards += 1
        if self._num_changes >= FEW_STEPS:
            self._warn(f"{FEW_STEPS} optimizer steps")
        elif self._num_forwards >= MANY_FORWARDS and not self._num_changes and not self._has_stepped:
            self._warn(f"{MANY_FORWARDS} training forwards")

    def _warn(self, seen: str) -> None:
        self._has_warned = True
        logger.warning(
            "balancer.step() was not called in the last %s: nothing is balanced without it. Call it once after every "
            "optimizer step, on every rank",
            seen,
        )


def _calling(watch: weakref.ref[ForwardWatch], name: str) -> Callable[[int, bool], None]:
    def forward(num_tokens: int, training: bool) -> None:
        alive = watch()
        if alive is not None:
            alive.forward(name, num_tokens, training)

    return forward
