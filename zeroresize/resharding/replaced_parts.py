"""A balancer looks whether the model and the optimizer are still those that it was made for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from zeroresize.optim.optimizers import stepped_tensors
from zeroresize.resharding.data_parallel import unwrap
from zeroresize.utils.torch_private import is_dtensor, is_flat_parameter, parameters_of


class ReplacedParts:
    """Compares the layers, their parameters and those that the optimizer steps with what they were at the start."""

    def __init__(self, model: nn.Module, layers: Mapping[str, Any], optimizer: Any) -> None:
        self._model, self._layers, self._optimizer = model, layers, optimizer
        self._parameters = {
            (name, kind): parameter
            for name, layer in self._layers.items()
            for kind, parameter in parameters_of(layer).items()
            if parameter is not None and not layer.is_sharded_further(parameter) and not is_flat_parameter(parameter)
            if not layer.moves_only or kind in layer.unit_dims  # others a host may renew
        }
        self._named: dict[str, Tensor] = {
            f"{name}.{kind}": parameter for (name, kind), parameter in self._parameters.items()
        }
        self._stepped = self._stepped_now()

    def why_not_same(self) -> str | None:
        """Return what was replaced, as the end of an error; None if nothing was. No collective."""
        gone = next(self._gone(), None)
        return None if gone is None else f"{gone}: close() the Balancer and make a new one of what there is now"

    def _gone(self) -> Iterator[str]:
        root = unwrap(self._model)
        elsewhere = {name: layer for name, layer in self._layers.items() if not _is_at(root, name, layer)}
        there = set(map(id, root.modules())) if elsewhere else set()  # they may have been wrapped
        for name, layer in elsewhere.items():
            if id(layer) not in there:
                yield f"layer {name} was replaced in the model, or taken out of it, after the Balancer was made"
        for (name, kind), parameter in self._parameters.items():
            layer = self._layers[name]
            now = parameters_of(layer).get(kind)
            if is_dtensor(now) and now is not parameter and layer.is_sharded_further(now):
                yield f"{name}.{kind} is a DTensor, a shard, as by a fully_shard after the Balancer was made"
            elif now is not parameter:
                yield f"{name}.{kind} was replaced by another Parameter after the Balancer was made"
        stepped = self._stepped_now() if self._stepped else set()
        for name in self._stepped - stepped:
            if self._named[name].requires_grad:
                yield f"the optimizer no longer steps {name}, which it did when the Balancer was made"

    def _stepped_now(self) -> set[str]:
        try:
            return set() if self._optimizer is None else set(stepped_tensors(self._optimizer, self._named))
        except ValueError:  # a wrapper that hides it, or ZeRO's shards
            return set()


def _is_at(root: nn.Module, name: str, layer: nn.Module) -> bool:
    with suppress(AttributeError):
        return root.get_submodule(name) is layer
    return False
