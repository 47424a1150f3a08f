"""Decisions from plain numbers: no collectives, no modules, no clock, so a simulator can make them, too.

How much each rank prunes and lends follows from exchanged numbers, alike on every rank; which columns these are, and
what a rank tells the others, from its own.
"""

#: Relative differences below this come from rounding.
ROUNDING = 1e-9
#: Of so many measurements at least, the middle one is no single interruption.
FEW = 3
