"""Strategies for slow ranks: which there are, and when they pay."""
