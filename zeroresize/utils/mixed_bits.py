"""Hashes of numbers, the same on every machine."""

from __future__ import annotations

_MASK_64 = (1 << 64) - 1


def mixed(first: int, other: int) -> int:
    """Hash two numbers to 64 bits (splitmix64)."""
    bits = (first * 0x9E3779B97F4A7C15 + other + 0x632BE59BD9B4E019) & _MASK_64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return bits ^ (bits >> 31)
