"""The products of a linear layer, whole or resized, by the implementation that is registered for device and dtype."""

from zeroresize.kernels.registry import (
    REFERENCE,
    Implementation,
    dgrad,
    dgrad_by_columns,
    forward,
    implementation_for,
    implementation_on,
    register,
    use_triton,
    wgrad,
)

__all__ = [
    "REFERENCE",
    "Implementation",
    "dgrad",
    "dgrad_by_columns",
    "forward",
    "implementation_for",
    "implementation_on",
    "register",
    "use_triton",
    "wgrad",
]
