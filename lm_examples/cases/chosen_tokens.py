"""Some tokens of each sequence, packed so that only they are computed.

``B`` sequences of ``T`` tokens; ``S`` sequences with chosen tokens, ``Q`` tokens in the one that has most.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ChosenTokens:
    """Where the chosen tokens are, in their order, the shorter sequences padded at the end.

    Args:
        chosen_BT: of bool.

    Attributes:
        sequences_S: the numbers of the sequences with any.
        places_SQ: in their sequence; behind the chosen ones those of other tokens, as padding.
        is_chosen_SQ: False for padding.
    """

    def __init__(self, chosen_BT: Tensor) -> None:
        self._shape = chosen_BT.shape
        self.sequences_S = chosen_BT.any(dim=1).nonzero().flatten()
        chosen_ST = chosen_BT[self.sequences_S]
        counts_S = chosen_ST.sum(dim=1)
        most = int(counts_S.max()) if len(counts_S) else 0
        self.places_SQ = chosen_ST.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        self.is_chosen_SQ = torch.arange(most, device=chosen_BT.device) < counts_S[:, None]

    @property
    def shape(self) -> tuple[int, int]:
        """[S, Q], padding included; [0, 0] where none is chosen."""
        return self.places_SQ.shape[0], self.places_SQ.shape[1]

    def of(self, x_BTD: Tensor) -> Tensor:
        """The chosen tokens [S, Q, D], and padding."""
        places = self.places_SQ[..., None].expand(-1, -1, x_BTD.shape[-1])
        return x_BTD[self.sequences_S].gather(1, places)

    def replaced(self, x_BTD: Tensor, new_SQD: Tensor) -> Tensor:
        """``x_BTD`` with other values for the chosen tokens, those of padding unused."""
        flat = self.sequences_S[:, None] * self._shape[1] + self.places_SQ
        rows = x_BTD.flatten(0, 1).index_copy(0, flat[self.is_chosen_SQ], new_SQD[self.is_chosen_SQ])
        return rows.view_as(x_BTD)
