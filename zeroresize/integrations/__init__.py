"""Hosts whose layers this package can balance; each is imported only when its library is already in use."""
