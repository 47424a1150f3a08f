"""The products of a linear layer, whole or resized."""

from zeroresize.kernels.reference import dgrad, forward, wgrad

__all__ = ["dgrad", "forward", "wgrad"]
