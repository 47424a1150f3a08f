"""One layer's loans: what it computes for other ranks, and other ranks for it, around its own products.

``T`` tokens, ``K`` input and ``N`` output features on a rank, ``L`` columns lent, ``m`` of them computed here. While
units are away from home, shards differ: ``N`` of a loan's matrices is the owner's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroresize import kernels
from zeroresize.comm.collectives import NamedWork, explanation, start_all_reduce
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.migration.gradient_return import GradientReturn
from zeroresize.migration.transport import LoanRoute, Pending, Transport
from zeroresize.plan.columns import Columns
from zeroresize.utils.torch_private import version_of


@dataclass(eq=False)
class LayerLoan:
    """Describes one rank's loan in one layer."""

    route: LoanRoute
    columns: Columns
    num_rows: int


class LayerLoans:
    """Carries out all loans in one layer, the same ones in the same order on every rank."""

    def __init__(
        self,
        name: str,
        loans: Sequence[LayerLoan],
        *,
        transport: Transport,
        weight_transport: Transport,
        layer: BalancedLinear,
        gradient_return: GradientReturn,
        send_all_weights: Callable[[], None],
    ) -> None:
        self.name, self._loans, self._transport = name, tuple(loans), transport
        self._layer, self._weight, self._probes = layer, layer.local_weight, layer.probes
        self._gradient_return = gradient_return
        self._weight_transport, self._send_all_weights = weight_transport, send_all_weights
        self._sent: list[Pending] | None = None
        self._sent_as: tuple[int, int] | None = None
        self._awaiting_return = self._weight
        self._rank = transport.rank
        self.lends = any(loan.route.owner == self._rank for loan in loans)
        self.has_loans = bool(self._loans)
        borrowed = (loan for loan in self._loans if loan.route.owner != self._rank)
        self.num_borrowed = sum(loan.num_rows * len(loan.columns.indices) for loan in borrowed)

    # ---- weights, once a step ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def send_weights(self) -> None:
        """Send the lent columns of the weight, which must not change until the next call."""
        self.finish_sending()
        weight_NK = self._weight.detach()
        self._awaiting_return = self._gradient_return.awaiting_return(self._layer.weight_in_graph, self._weight)
        self._sent = []
        for loan in self._loans:
            name = ("w", self.name, loan.route.owner)
            packed = None
            if loan.route.owner == self._rank:
                packed = loan.columns.copy_of(weight_NK)
            self._sent.append(self._weight_transport.send_slice(loan.route, packed, loan.num_rows, weight_NK, name))
        self._sent_as = version_of(self._weight), self._weight.data_ptr()

    def finish_sending(self) -> None:
        """Wait until the last weights have been sent."""
        for pending in self._sent or ():
            pending.wait()
        self._sent = None

    @property
    def bytes_held(self) -> int:
        """Memory of the borrowed columns of the weight, and of those of others beside which they arrived."""
        held = [pending.tensor for pending in self._sent or () if pending.tensor is not None]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    def forward_begins(self, weight: Tensor) -> None:
        """Check the layer's ``weight`` [N, K]; after loans have changed, the first layer sends all layers' weights.

        Every rank's training forward comes here, so all ranks send at the same place.
        """
        if self._sent is None:
            self._send_all_weights()
        if self._loans:
            self._check_weight(weight)

    def weight_in_force(self, weight: Tensor) -> Tensor:
        """Return the layer's ``weight`` as a tensor whose gradient waits for the lent columns.

        It is called on every rank, whether columns are lent or not, so autograd accumulates gradients and calls their
        hooks in the same order everywhere.
        """
        self.forward_begins(weight)
        if not self._loans and weight is not self._weight:  # replaced, and nothing of it is lent
            return self._layer.weight_in_graph()
        now = self._awaiting_return
        is_other = now.data_ptr() != weight.data_ptr()  # put there through .data, or on another device
        if is_other or now.requires_grad != self._layer.weight.requires_grad:  # frozen, or not any more
            self._awaiting_return = self._gradient_return.awaiting_return(self._layer.weight_in_graph, weight)
        return self._awaiting_return

    def _check_weight(self, weight: Tensor) -> None:
        is_as_sent = self._sent_as == (version_of(weight), weight.data_ptr())
        if weight is not self._weight or self._sent is None or not is_as_sent:
            failed = f"the weight of layer {self.name} changed, and balancer.step() was not called after it"
            raise RuntimeError(
                f"the weight of layer {self.name} changed after its columns were lent: weights may change only in "
                "optimizer.step(), and balancer.step() must follow it; when a model is loaded during training, load "
                "the balancer's state too"
                f"{explanation(self._transport.process_group, failed, waits=False)}"
            )

    def _borrowed_weights(self, like: Tensor) -> list[Tensor | None]:
        """Return each loan's borrowed columns [N, m], of the dtype of ``like``; None where this rank receives none."""
        if not self._loans:
            return []
        self._check_weight(self._weight)
        assert self._sent is not None
        self._sent = [Pending(pending.wait()) for pending in self._sent]
        return [pending.tensor.to(like.dtype) if pending.tensor is not None else None for pending in self._sent]

    # ---- column-parallel: x is everywhere, y is the owner's ----------------------------------------------------------

    def column_forward(self, x_TK: Tensor, multiply: Callable[[], Tensor]) -> Tensor:
        """Compute y [T, N] of this rank's rows: ``multiply()`` plus what other ranks computed of it."""
        weights = self._borrowed_weights(x_TK)
        expected = self._expect_y(x_TK)
        y_TN = multiply() if self.lends else None  # an owner's own part: the receivers' parts are added to it
        whole: Pending | None = None
        for loan, w_Nm in zip(self._loans, weights, strict=True):
            if not self._transport.takes_part_in_sum(loan.route):
                continue
            if loan.route.owner == self._rank:
                assert y_TN is not None
                whole = self._transport.add_up(loan.route, y_TN, expected)
                continue
            part_TN = self._product(kernels.forward, loan.columns.of(x_TK), w_Nm)
            addend = x_TK.new_zeros(len(x_TK), loan.num_rows) if part_TN is None else part_TN
            self._transport.give(loan.route, addend, ("y", loan.route.owner))
        if whole is not None:
            whole.wait()
        return multiply() if y_TN is None else y_TN

    def _expect_y(self, x_TK: Tensor) -> list[Pending]:
        """Expect, on an owner, the addends to y [T, N] that receivers will send; none on other ranks."""
        loans = [loan for loan in self._loans if loan.route.owner == self._rank]
        shapes = [(loan.route, (len(x_TK), loan.num_rows)) for loan in loans]
        return [addend for route, shape in shapes for addend in self._transport.expect_addends(route, shape, x_TK)]

    def column_backward(
        self,
        dy_TN: Tensor,
        x_TK: Tensor,
        *,
        own_dgrad: Callable[[], Tensor] | None,
        own_wgrad: Callable[[], Tensor] | None,
        sums: bool,
    ) -> tuple[Tensor | None, Tensor | None, NamedWork | None]:
        """Compute (dx [T, K], dw [N, K], the all-reduce of dx if it ``sums``); None for what is not asked for."""
        self._gradient_return.backward_begins()
        weights = self._borrowed_weights(x_TK)
        sent = [self._transport.send_whole(loan.route, dy_TN, loan.num_rows) for loan in self._loans]
        dx_TK = own_dgrad() if own_dgrad is not None else None
        borrowed = list(zip(self._loans, weights, [pending.wait() for pending in sent], strict=True))
        if dx_TK is not None:
            for loan, w_Nm, dy_of_owner_TN in borrowed:
                self._add_to_dx(loan, dx_TK, self._product(kernels.dgrad, dy_of_owner_TN, w_Nm))
        group = self._transport.process_group
        work = start_all_reduce(dx_TK, group, self.name) if sums and dx_TK is not None else None
        dw_NK = own_wgrad() if own_wgrad is not None else None
        if own_wgrad is not None:
            for loan, w_Nm, dy_of_owner_TN in borrowed:
                x_Tm = None if w_Nm is None else loan.columns.of(x_TK)
                self._return_dw(loan, self._product(kernels.wgrad, dy_of_owner_TN, x_Tm), dw_NK)
        return dx_TK, dw_NK, work

    def _add_to_dx(self, loan: LayerLoan, dx_TK: Tensor, dx_Tm: Tensor | None) -> None:
        if self._transport.merges:
            if dx_Tm is not None:
                loan.columns.add(dx_TK, dx_Tm)
            return
        dx_TL = self._transport.return_slice(loan.route, dx_Tm, len(dx_TK), dx_TK, ("dx", loan.route.owner)).wait()
        if dx_TL is not None:
            loan.columns.put(dx_TK, dx_TL)

    # ---- row-parallel: y is summed over all ranks, x and dx are the owner's ------------------------------------------

    def row_forward(self, x_TK: Tensor, multiply: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Compute y [T, N], not yet summed over the group; return it, and the borrowed x [T, m] for backward."""
        weights = self._borrowed_weights(x_TK)
        sent = []
        for loan in self._loans:
            owner = loan.route.owner
            x_TL = loan.columns.copy_of(x_TK) if owner == self._rank else None
            sent.append(self._transport.send_slice(loan.route, x_TL, len(x_TK), x_TK, ("x", owner)))
        expected = [] if self._transport.merges else self._expect_y(x_TK)
        y_TN = multiply()
        kept = []
        for loan, w_Nm, pending in zip(self._loans, weights, sent, strict=True):
            x_Tm = pending.wait()
            if w_Nm is not None:
                assert x_Tm is not None
                x_Tm = x_Tm.contiguous()
                kept.append(x_Tm)
            self._add_to_y(loan, y_TN, self._product(kernels.forward, x_Tm, w_Nm), expected)
        return y_TN, kept

    def row_backward(
        self,
        dy_TN: Tensor,
        kept: Sequence[Tensor],
        *,
        own_dgrad: Callable[[], Tensor] | None,
        own_wgrad: Callable[[], Tensor] | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute (dx [T, K], dw [N, K]) as :meth:`column_backward`."""
        self._gradient_return.backward_begins()
        weights = self._borrowed_weights(dy_TN)
        pieces = iter(kept)
        x_parts = [next(pieces) if w_Nm is not None else None for w_Nm in weights]
        returned: list[Pending] = []
        if own_dgrad is not None:
            for loan, w_Nm in zip(self._loans, weights, strict=True):
                dx_Tm, name = self._product(kernels.dgrad, dy_TN, w_Nm), ("dx", loan.route.owner)
                returned.append(self._transport.return_slice(loan.route, dx_Tm, len(dy_TN), dy_TN, name))
        dx_TK = own_dgrad() if own_dgrad is not None else None
        dw_NK = own_wgrad() if own_wgrad is not None else None
        if own_wgrad is not None:
            for loan, x_Tm in zip(self._loans, x_parts, strict=True):
                self._return_dw(loan, self._product(kernels.wgrad, dy_TN, x_Tm), dw_NK)
        for loan, pending in zip(self._loans, returned, strict=bool(returned)):
            dx_TL = pending.wait()
            if dx_TL is not None:
                assert dx_TK is not None
                loan.columns.put(dx_TK, dx_TL)
        return dx_TK, dw_NK

    def _add_to_y(self, loan: LayerLoan, y_TN: Tensor, part_TN: Tensor | None, expected: Sequence[Pending]) -> None:
        if self._transport.merges:
            if part_TN is not None:
                y_TN.add_(part_TN)
        elif loan.route.owner == self._rank:
            self._transport.add_up(loan.route, y_TN, expected).wait()
        elif part_TN is not None:
            self._transport.give(loan.route, part_TN, ("y", loan.route.owner))

    def _product(self, kernel: Callable[..., Tensor], of: Any, borrowed: Tensor | None) -> Tensor | None:
        """The product with what this rank has borrowed, measured as its own are; None where it borrows nothing."""
        return None if borrowed is None else self._probes.product(kernel, of, borrowed, None, None)

    # ---- dw ----------------------------------------------------------------------------------------------------------

    def whole_gradient(self, dw_NK: Tensor) -> Tensor:
        """Return ``dw_NK`` with the columns that other ranks compute, once they are there; in its backward."""
        return self._gradient_return.whole(self._weight, dw_NK)

    def _return_dw(self, loan: LayerLoan, dw_Nm: Tensor | None, like: Any) -> None:
        name = ("dw", self.name, loan.route.owner)
        pending = self._transport.return_slice(loan.route, dw_Nm, loan.num_rows, like, name)
        if loan.route.owner == self._rank:
            self._gradient_return.expect(self._weight, loan.columns, pending)
