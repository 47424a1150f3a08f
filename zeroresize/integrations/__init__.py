"""Hosts whose layers this package can balance; each is imported only when its library is already in use."""

from zeroresize.integrations.hosts import HostAdapter, SwappedClasses, register_host

__all__ = ["HostAdapter", "SwappedClasses", "register_host"]
