"""Where measuring and injected slowness attach to a layer's products, so that the products know neither.

A *product* is one of y = x wᵀ, dx = dy w and dw = dyᵀ x as a layer carries it out, with its gathers and fills; the
*gemm* is the matrix multiplication inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor


class Probe:
    """Watches or slows a layer's products; each method does nothing unless overridden.

    Attributes:
        sees_evaluation: whether it is also told of the products of layers in evaluation.
    """

    sees_evaluation: ClassVar[bool] = True

    def product_begins(self) -> None:
        """Called before a product, gathers included."""

    def product_ends(self) -> None:
        """Called after a product, before its result can reach a collective."""

    def gemm_begins(self, operands: tuple[Any, ...]) -> None:
        """Called before the matrix multiplication of ``operands``."""

    def gemm_ends(self, operands: tuple[Any, ...]) -> None:
        """Called after the matrix multiplication of ``operands``."""


class Probes:
    """The probes of one layer, outermost first: what is added outermost sees what the others do."""

    def __init__(self, probes: Iterable[Probe] = ()) -> None:
        self._probes = tuple(probes)

    def add_outermost(self, probe: Probe) -> None:
        self._probes = (probe, *self._probes)

    def add_innermost(self, probe: Probe) -> None:
        self._probes = (*self._probes, probe)

    def remove(self, probe: Probe) -> None:
        self._probes = tuple(other for other in self._probes if other is not probe)

    def of_evaluation(self) -> Probes:
        """Those that are told of an evaluation's products, too."""
        return Probes(probe for probe in self._probes if probe.sees_evaluation)

    def holds(self, kind: type[Probe]) -> bool:
        """Whether a probe of this kind is attached."""
        return any(isinstance(probe, kind) for probe in self._probes)

    def product(self, kernel: Callable[..., Tensor], *operands: Any) -> Tensor:
        """Carry out ``kernel(*operands, gemm)``, where ``gemm`` is how the kernel must multiply."""
        for probe in self._probes:
            probe.product_begins()
        result = kernel(*operands, self.gemm)
        for probe in reversed(self._probes):
            probe.product_ends()
        return result

    def gemm(self, multiply: Callable[..., Tensor], *operands: Any) -> Tensor:
        """Carry out ``multiply(*operands)``.

        Inner probes act first, before and after: what one adds before is not part of the multiplication that the outer
        ones see, what it adds after is.
        """
        for probe in reversed(self._probes):
            probe.gemm_begins(operands)
        result = multiply(*operands)
        for probe in reversed(self._probes):
            probe.gemm_ends(operands)
        return result


#: How a kernel multiplies: ``gemm(multiply, *operands)`` returns ``multiply(*operands)``.
Gemm = Callable[..., Tensor]
