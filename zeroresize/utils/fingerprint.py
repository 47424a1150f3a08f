"""One hash of plain values, short enough to be compared between ranks as a number."""

from __future__ import annotations

import hashlib

#: Bits of a fingerprint: so many a float holds exactly.
_NUM_BITS = 52


def fingerprint(content: str | bytes) -> float:
    """Return a whole number of 52 bits, which a float holds exactly; equal for equal contents."""
    return float(int.from_bytes(digest(content)[:8], "big") >> (64 - _NUM_BITS))


def digest(*contents: str | bytes | memoryview) -> bytes:
    """Return a hash of 16 bytes of contents one after another: texts in UTF-8, bytes, or what has a buffer of bytes."""
    hashed = hashlib.blake2b(digest_size=16)
    for content in contents:
        hashed.update(content.encode() if isinstance(content, str) else content)
    return hashed.digest()
