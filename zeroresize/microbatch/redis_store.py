"""An instruction store on a Redis server, which planners and executors of several hosts reach (DynaPipe, section 7)."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

try:
    import redis
    from redis.backoff import ExponentialBackoff
    from redis.retry import Retry
except ImportError as error:
    raise ImportError("a store on a Redis server needs the package redis: pip install 'zeroresize[redis]'") from error

from zeroresize.microbatch.store import ANSWER_S, InstructionStore, StoreError

_T = TypeVar("_T")

#: Seconds for which the server keeps what a run has left that was killed, from its last word on.
_KEPT_S = 7 * 24 * 3600
#: How often a connection that was lost is made again before that is an error, and the seconds between two tries.
_NUM_TRIES, _LEAST_PAUSE_S, _MOST_PAUSE_S = 4, 0.05, 0.4


class RedisStore(InstructionStore):
    """Keeps plans on a Redis server, or on one that speaks its protocol, such as Valkey.

    A run keeps all of its plans under one key of its own, so a server may serve several. It must not evict keys: its
    ``maxmemory-policy`` stays ``noeviction``.

    Args:
        address: ``redis://[user:password@]host[:port][/database]``, ``rediss://`` for TLS, ``unix://`` for a socket.
            Behind it ``#name`` joins the run of that name; without one a new run begins, whose plans :meth:`close`
            removes.
        answer_s: seconds within which the server has to answer.

    Raises:
        ValueError: for an address of another kind.
        StoreError: if the server cannot be reached, or does not let this user in.
    """

    def __init__(self, address: str, *, answer_s: float = ANSWER_S) -> None:
        url, _, name = address.partition("#")
        self._is_maker = not name
        name = name or uuid.uuid4().hex
        self.address, self._key = f"{url}#{name}", f"zeroresize:{name}"
        lost = Retry(
            ExponentialBackoff(cap=_MOST_PAUSE_S, base=_LEAST_PAUSE_S),
            _NUM_TRIES - 1,
            supported_errors=(redis.ConnectionError,),  # not those that time out: they have waited long enough
        )
        try:
            self._client: Any = redis.Redis.from_url(
                url, retry=lost, socket_timeout=answer_s, socket_connect_timeout=answer_s
            )
        except ValueError as error:
            raise ValueError(
                f"{self.shown_address!r} is not allowed as the address of a Redis server: {error}"
            ) from error
        self._answer(self._client.ping, "open it")

    @property
    def shown_address(self) -> str:
        """Return the address without a user, a password and the run."""
        return re.sub("//[^/]*@", "//", re.split("[?#]", self.address)[0])

    def close(self) -> None:
        """Leave the server; who began the run removes what is left of it."""
        try:
            if self._is_maker:
                self._client.delete(self._key)
        except redis.RedisError:  # it removes that itself some time
            pass
        finally:
            self._client.close()

    def _set(self, name: str, value: bytes, purpose: str) -> None:
        def leave() -> None:
            with self._client.pipeline() as commands:
                commands.hset(self._key, name, value)
                commands.expire(self._key, _KEPT_S)
                commands.execute()

        self._answer(leave, purpose)

    def _get(self, name: str, purpose: str) -> bytes | None:
        return self._answer(lambda: self._client.hget(self._key, name), purpose)

    def _delete(self, names: Iterable[str], purpose: str) -> None:
        dropped = list(names)
        if dropped:
            self._answer(lambda: self._client.hdel(self._key, *dropped), purpose)

    def _names(self, purpose: str) -> list[str]:
        return [name.decode() for name in self._answer(lambda: self._client.hkeys(self._key), purpose)]

    def _answer(self, call: Callable[[], _T], purpose: str) -> _T:
        try:
            return call()
        except redis.RedisError as error:
            raise StoreError(
                f"the instruction store at {self.shown_address} was asked to {purpose}: {error}. Is the Redis server "
                "there, and reached from this host?"
            ) from error
