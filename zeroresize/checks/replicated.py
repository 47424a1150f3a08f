"""Parameters that all ranks of a group should hold alike: sums by which copies, and their gradients, are compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import same_ranks
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.weight_checks import is_marked_as_shard
from zeroresize.utils.hashing import fingerprint

#: Elements that are summed at once, and side by side.
_PIECE, _ROW = 2**22, 64
#: Small is a gradient whose norm is below this part of the largest; alike are two that differ by less.
_SMALL, _ALIKE = 1e-3, 1e-6


def replicated_parameters(model: nn.Module, process_group: ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """Parameters that are surely meant to be the same on all ranks of the group, by name; torch sums none of 8 bits."""
    shards: set[int] = set()
    comparable: dict[str, Tensor] = {}
    makers: set[int] = set()  # parametrizations of shards, such as weight_norm, hold shards
    for prefix, module in model.named_modules():
        parameters = dict(module.named_parameters(prefix, recurse=False))
        parametrizations = getattr(module, "parametrizations", None)
        if isinstance(parametrizations, nn.Module) and _holds_group(module):
            makers |= {id(one) for one in parametrizations.modules()}
        whole: dict[str, Tensor] = parameters
        if isinstance(module, BalancedLinear):
            shards |= {id(getattr(owner, attribute)) for owner, attribute, *_ in module.extra}
            is_whole = not module.is_column_parallel and same_ranks(module.process_group, process_group)
            whole = {name: one for name, one in parameters.items() if is_whole and name.rpartition(".")[2] == "bias"}
        elif _holds_group(module) or id(module) in makers:
            whole = {}
        whole = {name: one for name, one in whole.items() if not _is_its_own(one)}
        shards |= {id(one) for name, one in parameters.items() if name not in whole}
        comparable |= whole
    for name, parameter in comparable.items():
        is_number = parameter.is_floating_point() and parameter.itemsize > 1 and not parameter.is_meta
        if id(parameter) not in shards and is_number:
            yield name, parameter


def _holds_group(module: nn.Module) -> bool:
    return any(isinstance(value, ProcessGroup) for value in vars(module).values())


def _is_its_own(parameter: Tensor) -> bool:
    """Tell whether a framework says that each rank has its own."""
    return is_marked_as_shard(parameter) or hasattr(parameter, "device_mesh")


def sums_of_parameters(parameters: Mapping[str, Tensor]) -> list[list[float]]:
    """Return each parameter's key, sums of its elements, plain and by place, and norm; one copy a device."""
    if not parameters:
        return []
    with torch.no_grad():
        sums = [sums_of(parameter) for parameter in parameters.values()]
    numbers = torch.stack([one.to(sums[0].device) for one in sums]).tolist()
    return [[key_of_parameter(name, one), *row] for (name, one), row in zip(parameters.items(), numbers, strict=True)]


def sums_of(parameter: Tensor) -> Tensor:
    """[3] in float64: of all elements, of the same weighted by place, so that their order shows, and the norm."""
    total = torch.zeros(3, dtype=torch.float64, device=parameter.device)
    for piece in parameter.detach().reshape(-1).split(_PIECE):
        values = piece.double()
        whole, rest = values.split([len(values) // _ROW * _ROW, len(values) % _ROW])
        sums = whole.view(-1, _ROW).sum(dim=0), whole.view(-1, _ROW).sum(dim=1), rest
        placed = torch.stack([part.dot(torch.linspace(-1.0, 1.0, len(part)).to(part)) for part in sums])
        total += torch.stack([values.sum(), placed.sum(), values.dot(values)])
    total[2].sqrt_()
    return total


def key_of_parameter(name: str, parameter: Tensor) -> float:
    """Return a fingerprint of what a parameter is."""
    return fingerprint(f"{name} {tuple(parameter.shape)}")


def distance_of_sums(sums: Sequence[float] | None, reference: Sequence[float], least: float = 0.0) -> float:
    """Return how far apart two ranks' numbers of a parameter are, of its norm or ``least``; 0 where one has none."""
    if sums is None or list(sums) == list(reference):
        return 0.0
    if any(map(math.isnan, (*sums, *reference))):
        are_alike = all(math.isnan(one) == math.isnan(other) for one, other in zip(sums, reference, strict=True))
        return 0.0 if are_alike else math.inf
    most = max(abs(one - other) for one, other in zip(sums, reference, strict=True))
    return most / max(sums[-1], reference[-1], least)


def differing_gradients(sums: Mapping[str, Sequence[Sequence[float]]], tolerance: float) -> tuple[list[str], bool]:
    """Name parameters whose gradients differ between ranks by more than rounding, the largest difference first.

    A factor that all gradients of a rank have, as clipping gives, does not count. Returned is also whether gradients of
    the last layer are alike: then what differs is a part of a sum, else other targets or random draws may be the cause.
    """
    least = _SMALL * max(each[-1] for of_ranks in sums.values() for each in of_ranks) or 1.0
    last = ([name for name, of_ranks in sums.items() if of_ranks[0][-1] >= least] or [*sums])[-1]
    factors = [each[-1] / (sums[last][0][-1] or 1.0) or 1.0 for each in sums[last]]
    distances = {
        name: max(
            distance_of_sums([number / factor for number in each], of_ranks[0], least)
            for each, factor in zip(of_ranks, factors, strict=True)
        )
        for name, of_ranks in sums.items()
    }
    differing = [name for name, distance in distances.items() if distance > tolerance]
    return sorted(differing, key=distances.__getitem__, reverse=True), distances[last] <= _ALIKE
