"""Units of segments on any rank: cut by hand from gathered tensors, and what a step then computes."""

import numpy as np
import torch
import torch.distributed as dist
from torch.testing import assert_close

from zeroresize.plan.ownership import OwnershipMap


def by_unit(tensor, description, num_units):
    """[blocks, units, rows, ...] of a rank's part."""
    moved = tensor.detach().movedim(description.dim, 0)
    return moved.reshape(description.num_blocks, num_units, description.rows, *moved.shape[1:])


def gathered(tensor, description, owned, group):
    """[blocks, U, rows, ...] with the units of all ranks in ascending order."""
    num_units = owned.counts[dist.get_rank(group)]
    own_part = by_unit(torch.zeros_like(description.parameter) if tensor is None else tensor, description, num_units)
    parts = [None] * owned.num_ranks
    dist.all_gather_object(parts, own_part.numpy(), group=group)
    whole = np.empty((description.num_blocks, len(owned.owners), *parts[0].shape[2:]), parts[0].dtype)
    for rank, part in enumerate(parts):
        whole[:, owned.units_of(rank)] = part
    return torch.from_numpy(whole)


def hold(segment, owned, group):
    """Let every rank hold the units that ``owned`` gives it."""
    mine = torch.from_numpy(owned.units_of(dist.get_rank(group)))
    for description in segment.tensors:
        whole = gathered(description.parameter, description, segment.owned, group)
        part = whole[:, mine].flatten(0, 2).movedim(0, description.dim)
        description.parameter.data = part.clone(memory_format=torch.contiguous_format)
        description.parameter.grad = None
    segment.owned = owned
    segment.follow(dist.get_rank(group))


def uneven_maps(segment):
    """All kinds of them: nearly nothing, nothing on one rank, units that do not lie beside each other."""
    num_units, num_ranks = len(segment.owned.owners), segment.owned.num_ranks
    units = np.arange(num_units)
    return [
        OwnershipMap((units > 0) * (num_ranks - 1), num_ranks),
        OwnershipMap(np.zeros_like(units), num_ranks),
        OwnershipMap(np.full_like(units, num_ranks - 1), num_ranks),
        OwnershipMap(units % num_ranks, num_ranks),
        OwnershipMap(num_ranks - 1 - units * num_ranks // num_units, num_ranks),
    ]


def results(model, segments, compute, group):
    """What ``compute(model)`` returns, and all gradients of its backward as if one rank had them."""
    model.zero_grad()
    y = compute(model)
    (y * torch.linspace(-1.0, 1.0, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    split = {one.name: (one, segment) for segment in segments for one in segment.tensors}
    found = {"y": y.detach()}
    for name, parameter in model.named_parameters():
        if name in split:
            description, segment = split[name]
            found[name] = gathered(parameter.grad, description, segment.owned, group)
        elif parameter.grad is not None:
            found[name] = parameter.grad.clone()
    return found


def assert_any_owner_computes_the_same(model, segments, compute, group):
    """In float64: every layout's y and gradients are those of even shares, and units that came home are bitwise so."""
    homes = [segment.owned for segment in segments]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    expected = results(model, segments, compute, group)
    for case in range(5):
        for segment in segments:
            hold(segment, uneven_maps(segment)[case], group)
        found = results(model, segments, compute, group)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_close(found[name], tensor, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
    for segment, home in zip(segments, homes, strict=True):
        hold(segment, home, group)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), weights, strict=True))
    found = results(model, segments, compute, group)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
