"""What layers hand to each other for packed sequences, found by running them once on the meta device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroresize.strategy.packed import Packed

#: Tokens of the two runs that find shapes: what differs between them is the number of tokens.
_NUMBERS_OF_TOKENS = (5, 7)


@dataclass(frozen=True)
class Activation:
    """Describes a tensor [T, …] between two layers, where T is the number of a micro-batch's tokens.

    Attributes:
        token_shape: what follows T.
    """

    token_shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, num_tokens: int, device: torch.device) -> Tensor:
        """Make [num_tokens, …], not initialized."""
        return torch.empty((num_tokens, *self.token_shape), dtype=self.dtype, device=device)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token's part."""
        return self.dtype.itemsize * torch.Size(self.token_shape).numel()


def find_activations(layers: Sequence[nn.Module]) -> list[Activation]:
    """Return [L − 1] what layer l hands to layer l + 1; nothing is computed.

    Args:
        layers: [L], whole, on any device; they stay as they are.

    Raises:
        ValueError: naming the layer that does not run on the meta device, or returns no floating-point tensor [T, …].
    """
    xs = [torch.empty(number, dtype=torch.int64, device="meta") for number in _NUMBERS_OF_TOKENS]
    packs = [Packed(tokens, tokens, (len(tokens),)) for tokens in xs]
    activations = []
    with torch.no_grad():
        for number, layer in enumerate(layers[:-1]):
            name, hollow = f"layer {number} ({type(layer).__name__})", _on_meta(layer)
            xs = [_called(name, hollow, x, packed) for x, packed in zip(xs, packs, strict=True)]
            (first, other), (few, more) = xs, _NUMBERS_OF_TOKENS
            if first.shape[1:] != other.shape[1:] or first.dtype != other.dtype:
                raise ValueError(
                    f"{name} returns {_kind_of(first)} for {few} tokens and {_kind_of(other)} for {more}: "
                    "layers before the last one must return one floating-point tensor [T, …], of which only T follows "
                    "the number of tokens"
                )
            activations.append(Activation(tuple(first.shape[1:]), first.dtype))
    return activations


def _called(name: str, layer: nn.Module, x: Tensor, packed: Packed) -> Tensor:
    """Its output [T, …].

    Raises:
        ValueError: if there is none.
    """
    num_tokens = packed.num_tokens
    try:
        output = layer(x, packed)
    except Exception as error:
        raise ValueError(
            f"{name} does not run on the meta device, by which the shapes of activations are found. It was called with "
            f"x = {_kind_of(x)} and packed = Packed(tokens, targets, lengths) of {num_tokens} tokens, as every layer "
            f"of a strategy is, and raised {type(error).__name__}: {error}. A layer that takes other arguments, such "
            "as a decoder layer of transformers, needs a module around it that makes them from these two"
        ) from error
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.shape[:1] != (num_tokens,):
        raise ValueError(
            f"{name} returns {_kind_of(output)} for {num_tokens} tokens: layers before the last one must return one "
            "floating-point tensor [T, …]"
        )
    return output


def _kind_of(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _on_meta(layer: nn.Module) -> nn.Module:
    memo: dict[int, object] = {}
    for tensor in itertools.chain(layer.parameters(), layer.buffers()):
        hollow = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(hollow, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else hollow
    return copy.deepcopy(layer, memo)
