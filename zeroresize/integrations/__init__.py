"""Hosts whose layers this package can balance, and modules whose segments it knows; both can be added to.

A library is imported only when it is already in use.
"""

from zeroresize.integrations.hosts import HostAdapter, HostForwardClasses, SwappedClasses, register_host
from zeroresize.integrations.known_modules import StaysEven, register_elementwise, register_segments

__all__ = [
    "HostAdapter",
    "HostForwardClasses",
    "StaysEven",
    "SwappedClasses",
    "register_elementwise",
    "register_host",
    "register_segments",
]
