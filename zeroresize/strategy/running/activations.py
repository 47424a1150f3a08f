"""What layers hand to each other for packed sequences, found by running them once on the meta device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroresize.strategy.packed import Packed

#: Tokens of the run that finds shapes: a size that no dimension of a model has by chance.
_NUM_TOKENS = 1_000_003


@dataclass(frozen=True)
class Activation:
    """A tensor [T, …] between two layers, where T is the number of a micro-batch's tokens.

    Attributes:
        token_shape: what follows T.
    """

    token_shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, num_tokens: int, device: torch.device) -> Tensor:
        """[num_tokens, …], not initialized."""
        return torch.empty((num_tokens, *self.token_shape), dtype=self.dtype, device=device)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's part."""
        return self.dtype.itemsize * torch.Size(self.token_shape).numel()


def find_activations(layers: Sequence[nn.Module]) -> list[Activation]:
    """[L − 1]: what layer l hands to layer l + 1; nothing is computed.

    Args:
        layers: [L], whole, on any device; they stay as they are.

    Raises:
        ValueError: naming the layer that does not run on the meta device, or returns no floating-point tensor [T, …].
    """
    tokens = torch.empty(_NUM_TOKENS, dtype=torch.int64, device="meta")
    packed = Packed(tokens, tokens, (_NUM_TOKENS,))
    x, found = tokens, []
    with torch.no_grad():
        for number, layer in enumerate(layers[:-1]):
            try:
                x = _on_meta(layer)(x, packed)
            except Exception as error:
                raise ValueError(
                    f"layer {number} ({type(layer).__name__}) does not run on the meta device, by which the shapes of "
                    f"activations are found: {error}"
                ) from error
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[:1] != (_NUM_TOKENS,):
                told = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(
                    f"layer {number} ({type(layer).__name__}) returns {told} for {_NUM_TOKENS} tokens: layers before "
                    "the last one must return one floating-point tensor [T, …]"
                )
            found.append(Activation(tuple(x.shape[1:]), x.dtype))
    return found


def _on_meta(layer: nn.Module) -> nn.Module:
    memo: dict[int, object] = {}
    for one in itertools.chain(layer.parameters(), layer.buffers()):
        hollow = torch.empty_like(one, device="meta")
        memo[id(one)] = nn.Parameter(hollow, one.requires_grad) if isinstance(one, nn.Parameter) else hollow
    return copy.deepcopy(layer, memo)
