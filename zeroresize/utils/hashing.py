"""Hashes, the same on every machine: of contents, short enough to be compared as numbers, and of numbers."""

from __future__ import annotations

import hashlib

#: Bits of a fingerprint: so many a float holds exactly.
_NUM_BITS = 52
_MASK_64 = (1 << 64) - 1


def fingerprint(content: str | bytes) -> float:
    """Return a whole number of 52 bits, which a float holds exactly; equal for equal contents."""
    return float(int.from_bytes(digest(content)[:8], "big") >> (64 - _NUM_BITS))


def digest(*contents: str | bytes | memoryview) -> bytes:
    """Return a hash of 16 bytes of contents one after another: texts in UTF-8, bytes, or what has a buffer of bytes."""
    hashed = hashlib.blake2b(digest_size=16)
    for content in contents:
        hashed.update(content.encode() if isinstance(content, str) else content)
    return hashed.digest()


def mixed(first: int, other: int) -> int:
    """Hash two numbers to 64 bits (splitmix64)."""
    bits = (first * 0x9E3779B97F4A7C15 + other + 0x632BE59BD9B4E019) & _MASK_64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return bits ^ (bits >> 31)
