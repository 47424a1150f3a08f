"""Strategies of parallelism: which one trains which sequences, and how weights get from one to another."""
