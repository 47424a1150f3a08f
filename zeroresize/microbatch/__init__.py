"""Micro-batches of samples of different lengths, planned ahead while training goes on (DynaPipe)."""
