"""Decisions as pure functions of plain numbers: no collectives, no modules, no clock.

Every rank calls them with the same exchanged numbers and so computes the same plan; a simulator can call them too.
"""
