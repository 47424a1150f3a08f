"""Mistakes in how tensor-parallel training is set up, found before they have trained anything.

DDP over the tensor-parallel group averages shards that belong to different columns; an optimizer of some layers leaves
the others as they are; ranks that begin with different weights train different models. None of them fails by itself.
"""

from __future__ import annotations

import hashlib
import logging
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from zeroresize.comm.collectives import group_ranks, same_ranks
from zeroresize.comm.exchange import Exchange
from zeroresize.layers.balanced_linear import BalancedLinear

logger = logging.getLogger(__name__)

Layers = Mapping[str, BalancedLinear]

#: Of its norm: what two ranks' copies of a parameter may differ by in sum. Rounding in another order, as atomic
#: additions on a GPU do it, stays below over a long training; other seeds, or another checkpoint, are far above.
_TOLERANCE = 1e-3
#: Elements that are summed at once.
_PIECE = 2**22
#: So many of what differs an error names.
_MOST_NAMED = 4
_HINT = "start_checks=False in the configuration turns this check off"


def check_optimizer(unknown: Sequence[str], *, is_error: bool) -> None:
    """Check that the optimizer steps every layer that is to learn.

    Args:
        unknown: names of layers whose weights it does not step although they want gradients.

    Raises:
        ValueError: if there are any; with ``is_error`` False they are warned of.
    """
    if not unknown:
        return
    named = f"{', '.join(unknown[:_MOST_NAMED])}{', …' if unknown[_MOST_NAMED:] else ''}"
    told = f"the optimizer does not step the weights of {named}, which want gradients: was it made before they were?"
    if is_error:
        raise ValueError(
            f"{told} Freeze them (requires_grad_(False)) where that is meant; where another optimizer steps them, "
            f"{_HINT}"
        )
    logger.warning("%s", told)


def check_data_parallelism(model: nn.Module, layers: Layers, process_group: ProcessGroup) -> None:
    """Check that no DistributedDataParallel around ``layers`` averages over ranks that hold different shards.

    Raises:
        ValueError: naming the ranks that it averages over.
    """
    around = [*model.modules(), getattr(DistributedDataParallel, "_active_ddp_module", None)]
    for module in around:
        if not isinstance(module, DistributedDataParallel):
            continue
        shared = sorted(set(group_ranks(module.process_group)) & set(group_ranks(process_group)))
        ignored = module.parameters_to_ignore
        averaged = {
            id(one) for name, one in module.module.named_parameters() if one.requires_grad and name not in ignored
        }
        if len(shared) > 1 and any(id(layer.weight) in averaged for layer in layers.values()):
            raise ValueError(
                f"DistributedDataParallel averages gradients over ranks {shared} of the job, which hold different "
                "shards of the layers: give it the data-parallel group (process_group=...), whose ranks hold the same "
                f"shards, or leave it away where there is no data parallelism; {_HINT}"
            )


class StartCheck:
    """Compares, in the first training forward, what the ranks of a group should hold alike; a model may be loaded until
    then.

    Compared are the parameters that are no shards, by a few sums of each. Left out is what may be a shard: parameters
    of modules that hold a process group, those that a framework has marked (``dist_layout``,
    ``tensor_model_parallel``), and those whose shapes differ between the ranks.

    Args:
        model: what is trained.
        layers: its balanced layers by name.
        process_group: their tensor-parallel group.
        exchange: with its ranks.
    """

    def __init__(self, model: nn.Module, layers: Layers, process_group: ProcessGroup, exchange: Exchange) -> None:
        self._model, self._layers, self._group, self._exchange = model, layers, process_group, exchange
        first: Any = next(iter(layers.values()))
        self._first = first
        hook = first.register_forward_pre_hook(_calling(weakref.WeakMethod(self._training_begins)))
        self.close = weakref.finalize(self, hook.remove)
        self.close.atexit = False

    def _training_begins(self, layer: BalancedLinear) -> None:
        is_copy = layer is not self._first  # which has the hook, too
        if is_copy or not layer.training or not self.close.alive:
            return
        self.close()
        check_data_parallelism(self._model, self._layers, self._group)
        self.compare()

    def compare(self) -> None:
        """Compare now; collective.

        Raises:
            ValueError: on every rank, naming the first parameters that differ and the ranks on which they do.
        """
        replicated = dict(_replicated(self._model, self._group))
        own = [number for row in _table(replicated) for number in row]
        tables = [
            {numbers[at]: numbers[at + 1 : at + 4] for at in range(0, len(numbers), 4)}
            for numbers in self._exchange.gather(own)
        ]
        differing: dict[str, list[int]] = {}
        for name, parameter in replicated.items():
            key = _key(name, parameter)
            if key in tables[0]:
                ranks = [rank for rank, table in enumerate(tables) if _differ(table.get(key), tables[0][key])]
                if ranks:
                    differing[name] = ranks
        if differing:
            named = [f"{name} on ranks {ranks}" for name, ranks in list(differing.items())[:_MOST_NAMED]]
            raise ValueError(
                f"{len(differing)} of {len(replicated)} parameters that all ranks of the group should hold alike "
                f"differ from rank 0's: {'; '.join(named)}{'; …' if len(differing) > _MOST_NAMED else ''}. Seed the "
                "ranks alike before the model is built, or load the same checkpoint on all. A shard of a layer of "
                f"your own is left out where its parameter has tensor_model_parallel=True; {_HINT}"
            )


def _calling(method: weakref.WeakMethod[Any]) -> Any:
    @torch.compiler.disable
    def call(layer: Any, inputs: Any) -> None:
        alive = method()
        if alive is not None:
            alive(layer)

    return call


def _replicated(model: nn.Module, process_group: ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """Parameters that are surely meant to be the same on all ranks of the group, by name; torch sums none of 8 bits."""
    shards: set[int] = set()
    found: dict[str, Tensor] = {}
    makers: set[int] = set()  # parametrizations of shards, such as weight_norm, hold shards
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(prefix, recurse=False))
        parametrizations = getattr(module, "parametrizations", None)
        if isinstance(parametrizations, nn.Module) and _holds_group(module):
            makers |= {id(one) for one in parametrizations.modules()}
        whole: dict[str, Tensor] = own
        if isinstance(module, BalancedLinear):
            is_whole = not module.is_column_parallel and same_ranks(module.process_group, process_group)
            whole = {name: one for name, one in own.items() if is_whole and name.rpartition(".")[2] == "bias"}
        elif _holds_group(module) or id(module) in makers:
            whole = {}
        whole = {name: one for name, one in whole.items() if not _is_marked(one)}
        shards |= {id(one) for name, one in own.items() if name not in whole}
        found |= whole
    for name, one in found.items():
        if id(one) not in shards and one.is_floating_point() and one.itemsize > 1 and not one.is_meta:
            yield name, one


def _holds_group(module: nn.Module) -> bool:
    return any(isinstance(value, ProcessGroup) for value in vars(module).values())


def _is_marked(parameter: Tensor) -> bool:
    """Whether a framework says that each rank has its own."""
    marks = getattr(parameter, "__dict__", {})
    return (
        hasattr(parameter, "dist_layout")
        or hasattr(parameter, "device_mesh")
        or bool(marks.get("tensor_model_parallel"))
        or any(isinstance(value, ProcessGroup) for value in marks.values())
    )


def _table(parameters: Mapping[str, Tensor]) -> list[list[float]]:
    """For each parameter its key, the sums of its even and of its odd elements, and its norm; one copy a device."""
    if not parameters:
        return []
    with torch.no_grad():
        sums = [_sums(parameter) for parameter in parameters.values()]
    told = torch.stack([one.to(sums[0].device) for one in sums]).tolist()
    return [[_key(name, one), *row] for (name, one), row in zip(parameters.items(), told, strict=True)]


def _sums(parameter: Tensor) -> Tensor:
    """[3] in float64."""
    total = torch.zeros(3, dtype=torch.float64, device=parameter.device)
    for piece in parameter.detach().reshape(-1).split(_PIECE):
        squares = torch.linalg.vector_norm(piece, dtype=torch.float64).square()
        total += torch.stack([piece[::2].sum(dtype=torch.float64), piece[1::2].sum(dtype=torch.float64), squares])
    total[2].sqrt_()
    return total


def _key(name: str, parameter: Tensor) -> float:
    """48 bits of a hash of what a parameter is, exact as a float64."""
    told = f"{name} {tuple(parameter.shape)}".encode()
    return float(int.from_bytes(hashlib.sha256(told).digest()[:6], "big"))


def _differ(own: Sequence[float] | None, reference: Sequence[float]) -> bool:
    """Whether two ranks' numbers of a parameter are of different ones; what one does not know does not differ."""
    if own is None:
        return False
    if any(map(math.isnan, (*own, *reference))):
        return any(math.isnan(one) != math.isnan(other) for one, other in zip(own, reference, strict=True))
    most = _TOLERANCE * max(own[-1], reference[-1])
    return any(abs(one - other) > most for one, other in zip(own, reference, strict=True))
