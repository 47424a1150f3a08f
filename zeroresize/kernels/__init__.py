"""The products of a linear layer, whole or resized."""

from zeroresize.kernels.reference import dgrad, dgrad_by_columns, forward, wgrad

__all__ = ["dgrad", "dgrad_by_columns", "forward", "wgrad"]
