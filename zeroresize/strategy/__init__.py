"""Strategies of parallelism that change while training goes on."""
