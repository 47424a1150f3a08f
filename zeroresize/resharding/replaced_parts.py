"""A balancer looks whether the model and the optimizer are still those that it was made for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.weight_checks import is_flat_parameters
from zeroresize.optim.optimizers import stepped_tensors
from zeroresize.resharding.data_parallel import unwrap
from zeroresize.utils.torch_private import children_of, parameters_of


class ReplacedParts:
    """Compares the layers, their parameters and those that the optimizer steps with what they were at the start.

    That takes some microseconds a layer, and no collective.

    Args:
        model, layers, optimizer: as of :class:`~zeroresize.balancer.Balancer`.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, BalancedLinear], optimizer: Any) -> None:
        self._model, self._layers, self._optimizer = model, layers, optimizer
        self._links = list(_links(model, layers))
        self._parameters = {
            f"{name}.{kind}": (layer, kind, parameter)
            for name, layer in layers.items()
            for kind, parameter in _own_parameters(layer).items()
            if not layer.is_sharded_further(parameter) and not is_flat_parameters(parameter)
        }
        self._stepped = self._stepped_now()

    def why_not_same(self) -> str | None:
        """Return what was replaced, as the end of an error; None if nothing was."""
        gone = self._gone_layer() or self._gone_parameter() or self._gone_from_optimizer()
        return None if gone is None else f"{gone}: close() the Balancer and make a new one of what there is now"

    def _gone_layer(self) -> str | None:
        if all(children_of(parent).get(key) is child for parent, key, child in self._links):
            return None
        there = set(map(id, self._model.modules()))
        for name, layer in self._layers.items():
            if id(layer) not in there:
                return f"layer {name} was replaced in the model, or taken out of it, after the Balancer was made"
        self._links = list(_links(self._model, self._layers))  # wrapped only
        return None

    def _gone_parameter(self) -> str | None:
        for name, (layer, kind, parameter) in self._parameters.items():
            now = _own_parameters(layer).get(kind)
            if now is parameter:
                continue
            if now is not None and layer.is_sharded_further(now):
                return f"{name} is a DTensor, a shard, as by a fully_shard after the Balancer was made"
            return f"{name} was replaced by another Parameter after the Balancer was made"
        return None

    def _gone_from_optimizer(self) -> str | None:
        gone = self._stepped - self._stepped_now() if self._stepped else ()
        for name in gone:
            if self._parameters[name][2].requires_grad:
                return f"the optimizer no longer steps {name}, which it did when the Balancer was made"
        return None

    def _stepped_now(self) -> set[str]:
        parameters = {name: parameter for name, (*_, parameter) in self._parameters.items()}
        if self._optimizer is None:
            return set()
        try:
            return set(stepped_tensors(self._optimizer, parameters))
        except ValueError:  # a wrapper that hides it, or ZeRO's shards
            return set()


def _own_parameters(layer: Any) -> dict[str, Tensor]:
    return {kind: parameter for kind, parameter in parameters_of(layer).items() if parameter is not None}


def _links(model: nn.Module, layers: Mapping[str, BalancedLinear]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Each module on the way to a layer, with its parent and its name there."""
    wanted = set(map(id, layers.values()))
    links: dict[tuple[int, str], tuple[nn.Module, str, nn.Module]] = {}
    root = unwrap(model)
    for name, module in root.named_modules():
        if id(module) not in wanted:
            continue
        parent = root
        for key in name.split(".") if name else ():
            child = children_of(parent)[key]
            assert child is not None
            links[id(parent), key] = parent, key, child
            parent = child
    yield from links.values()
