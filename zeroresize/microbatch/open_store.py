"""Opens an instruction store by its address, whatever keeps it."""

from __future__ import annotations

from urllib.parse import urlsplit

from zeroresize.microbatch.embedded_store import EmbeddedStore
from zeroresize.microbatch.store import ANSWER_S, InstructionStore

_REDIS = ("redis", "rediss", "unix")


def open_store(address: str, *, answer_s: float = ANSWER_S) -> InstructionStore:
    """Return the store at an address: ``tcp://host:port`` of an embedded one, or ``redis://…`` of a Redis server.

    Args:
        answer_s: seconds within which it has to answer.

    Raises:
        ValueError: for an address of another kind.
        ImportError: for a Redis server where the package redis is not installed.
        StoreError: if the store cannot be reached.
    """
    scheme = urlsplit(address).scheme
    if scheme == "tcp":
        return EmbeddedStore(address, answer_s=answer_s)
    if scheme in _REDIS:
        from zeroresize.microbatch.redis_store import RedisStore  # an extra of the package

        return RedisStore(address, answer_s=answer_s)
    raise ValueError(
        f"{address!r} is not allowed as the address of an instruction store: tcp://host:port of an embedded store, or "
        "redis://host:port/database of a Redis server is needed"
    )
