"""How a layer sees products that other ranks compute for it, and it for them: a protocol.

``T`` tokens, ``K`` input and ``N`` output features on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from zeroresize.comm.collectives import NamedWork
from zeroresize.utils.torch_private import in_compiled_autograd, not_in_graphs

#: Computes this rank's own part of a product when it is called.
OwnProduct = Callable[[], Tensor]


class SharedProducts(Protocol):
    """Computes one layer's products where other ranks compute some of its columns, or this rank some of theirs.

    Attributes:
        name: of the layer.
        has_loans: whether any rank of the group lends columns of the layer now; the same on all of them.
    """

    name: str
    has_loans: bool

    def weight_in_force(self, weight: Tensor) -> Tensor:
        """Return the layer's ``weight`` [N, K] as the tensor to multiply with; its gradient will hold all columns."""

    def forward_begins(self, weight: Tensor) -> None:
        """Send the weights that are lent, if none were sent yet, and check that ``weight`` is still as it was sent.

        :meth:`weight_in_force` does so itself.
        """

    def whole_gradient(self, dw_NK: Tensor) -> Tensor:
        """Wait for the columns of a backward's dw that other ranks computed, and return it with them.

        Where :meth:`weight_in_force` gave the weight, autograd does so once all layers are done.
        """

    def column_forward(self, x_TK: Tensor, multiply: OwnProduct) -> Tensor:
        """Compute y [T, N] of a column-parallel layer: ``multiply()`` plus what other ranks computed of it."""

    def column_backward(
        self, dy_TN: Tensor, x_TK: Tensor, *, own_dgrad: OwnProduct | None, own_wgrad: OwnProduct | None
    ) -> tuple[Tensor | None, Tensor | None, NamedWork | None]:
        """Compute (dx [T, K], dw [N, K], the running all-reduce of dx); None for what is not asked for."""

    def row_forward(self, x_TK: Tensor, multiply: OwnProduct) -> tuple[Tensor, list[Tensor]]:
        """Compute (y [T, N] of a row-parallel layer, not yet summed over the group; what backward needs)."""

    def row_backward(
        self,
        dy_TN: Tensor,
        kept: Sequence[Tensor],
        *,
        own_dgrad: OwnProduct | None,
        own_wgrad: OwnProduct | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute (dx [T, K], dw [N, K]) as :meth:`column_backward`; ``kept`` is from :meth:`row_forward`."""


@not_in_graphs
def require_eager_autograd() -> None:
    """Raise if compiled autograd runs the current backward.

    It would capture the waits for other ranks' gradients once, and lose what several micro-batches share after the
    first.

    Raises:
        RuntimeError: naming what to change.
    """
    if in_compiled_autograd():
        raise RuntimeError(
            "the modes that migrate ('mig', 'semi') do not work with compiled autograd: gradients of lent columns need "
            "the order in which torch's own engine runs backward. Turn torch._dynamo.config.compiled_autograd off, or "
            "choose a mode that only prunes"
        )
