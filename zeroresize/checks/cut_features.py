"""Where a forward cuts the features that a column-parallel layer returns into blocks, as of a packed weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zeroresize.layers.local_parts import local_of

_CUTS = {
    "chunk": 2,
    "split": 2,
    "tensor_split": 2,
    "split_with_sizes": 2,
    "unbind": 1,
    "narrow": 1,
    "select": 1,
    "glu": 1,
}
#: What mixes features, whatever shape it returns.
_MIXES = ("linear", "matmul", "__matmul__", "bmm", "einsum", "scaled_dot_product_attention", "layer_norm", "rms_norm")


class CutFeatures:
    """Follows the features of column-parallel layers through views and element-wise functions.

    Where a view divides them only the outermost part is followed: heads, or the parts of a packed weight.

    Attributes:
        cuts: the name of the function that cuts, by the layer's name.
    """

    def __init__(self) -> None:
        self.cuts: dict[str, str] = {}
        #: The layer, the dimension counted from the last, and the tensor, whose ``id`` is nobody else's then.
        self._followed: dict[int, tuple[str, int, Tensor]] = {}

    def begin(self, name: str, module: Any, output: Any) -> None:
        """Follow what a layer returns, if its weight is cut as a whole."""
        y = output[0] if isinstance(output, tuple) else output
        is_whole = not getattr(module, "parts", None) and "Fused" not in type(module).__name__
        rows = local_of(module.weight).shape[0]
        if is_whole and isinstance(y, Tensor) and local_of(y).shape[-1] == rows:
            self._followed[id(y)] = name, -1, y

    def follow(self, function: str, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """See what ``function`` makes of what is followed."""
        x = next((one for one in args if id(one) in self._followed), None)
        if x is None or function in _MIXES:
            return
        layer, axis, _ = self._followed[id(x)]
        if function == "__getitem__":
            if _cuts(args[1], x.ndim + axis, x.ndim):
                self.cuts.setdefault(layer, "slice")
        elif function in _CUTS:
            dim = kwargs.get("dim", (*args, *(None,) * 3)[_CUTS[function]])
            dim = (-1 if function == "glu" else 0) if dim is None else dim
            if dim % x.ndim - x.ndim == axis and not (isinstance(output, tuple | list) and len(output) == 1):
                self.cuts.setdefault(layer, function)
            return
        if not isinstance(output, Tensor):
            return
        new: int | None = axis if output.shape == x.shape else None
        if function in ("transpose", "swapaxes", "permute"):
            order = list(range(-x.ndim, 0))
            if function == "permute":
                given = args[1] if isinstance(args[1], tuple | list) else args[1:]
                order = [dim % x.ndim - x.ndim for dim in given]
            else:
                first, second = (dim % x.ndim for dim in args[1:3])
                order[first], order[second] = order[second], order[first]
            new = order.index(axis) - x.ndim
        elif axis == -1 and function in ("view", "reshape", "unflatten", "_unsafe_view"):
            most = max(output.ndim - x.ndim + 1, 1)
            new = next((-k for k in range(most, 0, -1) if math.prod(output.shape[-k:]) == x.shape[-1]), None)
        elif function == "__getitem__" and output.ndim != x.ndim:
            new = None
        if new is not None:
            self._followed[id(output)] = layer, new, output


def _cuts(index: Any, at: int, ndim: int) -> bool:
    """Tell whether an index takes a part of dimension ``at``."""
    given = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(one, Tensor | list) for one in given):
        return False
    num_given = sum(one is not None and one is not Ellipsis for one in given)
    if Ellipsis in given:
        place = given.index(Ellipsis)
        given[place : place + 1] = [slice(None)] * (ndim - num_given)
    given = [one for one in given if one is not None]
    return at < len(given) and given[at] != slice(None)
