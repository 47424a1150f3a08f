"""Stragglers on demand: ranks made slow on purpose, for tests, studies and demonstrations.

What is injected multiplies what a rank really executes, so a rank that computes less is also delayed less.
"""

from zeroresize.injection.injector import StragglerInjector
from zeroresize.injection.schedule import Schedule, round_robin, static
from zeroresize.injection.slow_ops import SlowOps

__all__ = ["Schedule", "SlowOps", "StragglerInjector", "round_robin", "static"]
