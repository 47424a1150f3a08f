"""Tensor parallelism: what each rank of a group owns, lends and prunes."""
