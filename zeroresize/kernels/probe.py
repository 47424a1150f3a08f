"""Where measuring and injected slowness attach to a layer's products, so that the products know neither.

A *product* is one of y = x wᵀ, dx = dy w and dw = dyᵀ x as a layer carries it out, with its gathers and fills; the
*gemm* is the matrix multiplication inside it. A fused kernel does all of a product in one piece, and shows no gemm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor


class ProductProbe:
    """A probe watches or slows a layer's products; each method does nothing unless overridden.

    Attributes:
        sees_evaluation: whether it also sees the products of layers in evaluation.
    """

    sees_evaluation: ClassVar[bool] = True

    def product_begins(self) -> None:
        """Note that a product begins, gathers included."""

    def product_ends(self) -> None:
        """Note that a product has ended, before its result can reach a collective."""

    def gemm_begins(self, operands: tuple[Any, ...]) -> None:
        """Note that the matrix multiplication of ``operands`` begins."""

    def gemm_ends(self, operands: tuple[Any, ...]) -> None:
        """Note that the matrix multiplication of ``operands`` has ended."""

    def whole_begins(self, operands: tuple[Any, ...]) -> None:
        """Note that a fused kernel of ``operands`` begins; by default as if all of it were a multiplication."""
        self.gemm_begins(operands)

    def whole_ends(self, operands: tuple[Any, ...]) -> None:
        """Note that a fused kernel has ended; by default as if all of it were a multiplication."""
        self.gemm_ends(operands)


class Probes:
    """The probes of one layer, outermost first: what is added outermost sees what the others do."""

    def __init__(self, probes: Iterable[ProductProbe] = ()) -> None:
        self._probes = tuple(probes)

    def add_outermost(self, probe: ProductProbe) -> None:
        """Add a probe around the others: it sees what they do."""
        self._probes = (probe, *self._probes)

    def add_innermost(self, probe: ProductProbe) -> None:
        """Add a probe within the others: they see what it does."""
        self._probes = (*self._probes, probe)

    def remove(self, probe: ProductProbe) -> None:
        """Remove a probe, if it is there."""
        self._probes = tuple(other for other in self._probes if other is not probe)

    def of_evaluation(self) -> Probes:
        """Return the probes that also see the products of an evaluation."""
        return Probes(probe for probe in self._probes if probe.sees_evaluation)

    def holds(self, kind: type[ProductProbe]) -> bool:
        """Return whether a probe of this kind is attached."""
        return any(isinstance(probe, kind) for probe in self._probes)

    def product(self, kernel: Callable[..., Tensor], *operands: Any) -> Tensor:
        """Carry out ``kernel(*operands, gemm)``, where ``gemm`` is how the kernel must multiply (these probes)."""
        for probe in self._probes:
            probe.product_begins()
        result = kernel(*operands, self)
        for probe in reversed(self._probes):
            probe.product_ends()
        return result

    def __bool__(self) -> bool:
        return bool(self._probes)

    def layer_begins(self, operands: tuple[Any, ...]) -> None:
        """Note that a forward, or a backward, of a whole layer begins, which counts as one multiplication."""
        for probe in self._probes:
            probe.product_begins()
        for probe in reversed(self._probes):
            probe.whole_begins(operands)

    def layer_ends(self, operands: tuple[Any, ...]) -> None:
        """Note that it has ended."""
        for probe in reversed(self._probes):
            probe.whole_ends(operands)
        for probe in reversed(self._probes):
            probe.product_ends()

    def __call__(self, multiply: Callable[..., Tensor], *operands: Any) -> Tensor:
        """Carry out ``multiply(*operands)``, the matrix multiplication in a product: by this call a kernel multiplies.

        Inner probes act first, before and after: what one adds before is not part of the multiplication that the outer
        ones see, what it adds after is.
        """
        for probe in reversed(self._probes):
            probe.gemm_begins(operands)
        result = multiply(*operands)
        for probe in reversed(self._probes):
            probe.gemm_ends(operands)
        return result

    def whole(self, kernel: Callable[..., Tensor], *operands: Any) -> Tensor:
        """Carry out ``kernel(*operands, gemm)`` of a fused kernel; probes act in the order of a multiplication."""
        for probe in reversed(self._probes):
            probe.whole_begins(operands)
        result = kernel(*operands, self)
        for probe in reversed(self._probes):
            probe.whole_ends(operands)
        return result
