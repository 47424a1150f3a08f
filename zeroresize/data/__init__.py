"""Plain data parallelism whose ranks are given samples by their speed."""
