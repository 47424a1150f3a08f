"""Pipelines: which stage has which layers, and how many stages there are."""
