"""A balancer looks whether the model and the optimizer are still those that it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.optim.optimizers import stepped_tensors
from zeroresize.resharding.data_parallel import unwrap
from zeroresize.utils.torch_private import children_of, is_flat_parameter, parameters_of


class ReplacedParts:
    """Compares the layers, their parameters and those that the optimizer steps with what they were at the start.

    That takes some microseconds a layer, and no collective.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, BalancedLinear], optimizer: Any) -> None:
        self._model, self._layers, self._optimizer = model, layers, optimizer
        self._parameters = {
            (name, kind): parameter
            for name, layer in layers.items()
            for kind, parameter in _parameters_of(layer).items()
            if not layer.is_sharded_further(parameter) and not is_flat_parameter(parameter)
        }
        self._stepped = self._stepped_now()

    def why_not_same(self) -> str | None:
        """Return what was replaced, as the end of an error; None if nothing was."""
        gone = self._gone_layer() or self._gone_parameter() or self._gone_from_optimizer()
        return None if gone is None else f"{gone}: close() the Balancer and make a new one of what there is now"

    def _gone_layer(self) -> str | None:
        root = unwrap(self._model)
        elsewhere = {name: layer for name, layer in self._layers.items() if id(_at(root, name)) != id(layer)}
        there = set(map(id, root.modules())) if elsewhere else set()  # they may have been wrapped
        for name, layer in elsewhere.items():
            if id(layer) not in there:
                return f"layer {name} was replaced in the model, or taken out of it, after the Balancer was made"
        return None

    def _gone_parameter(self) -> str | None:
        for (name, kind), parameter in self._parameters.items():
            layer = self._layers[name]
            now = _parameters_of(layer).get(kind)
            if now is parameter:
                continue
            if now is not None and layer.is_sharded_further(now):
                return f"{name}.{kind} is a DTensor, a shard, as by a fully_shard after the Balancer was made"
            return f"{name}.{kind} was replaced by another Parameter after the Balancer was made"
        return None

    def _gone_from_optimizer(self) -> str | None:
        gone = self._stepped - self._stepped_now() if self._stepped else ()
        for name in gone:
            if self._named[name].requires_grad:
                return f"the optimizer no longer steps {name}, which it did when the Balancer was made"
        return None

    @property
    def _named(self) -> dict[str, Tensor]:
        return {f"{name}.{kind}": parameter for (name, kind), parameter in self._parameters.items()}

    def _stepped_now(self) -> set[str]:
        try:
            return set() if self._optimizer is None else set(stepped_tensors(self._optimizer, self._named))
        except ValueError:  # a wrapper that hides it, or ZeRO's shards
            return set()


def _parameters_of(layer: Any) -> dict[str, Tensor]:
    return {kind: parameter for kind, parameter in parameters_of(layer).items() if parameter is not None}


def _at(module: nn.Module | None, name: str) -> nn.Module | None:
    for key in name.split("."):
        module = None if module is None else children_of(module).get(key)
    return module
