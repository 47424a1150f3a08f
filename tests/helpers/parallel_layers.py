"""Parallel layers on real ranks beside the whole ones: as they are, lending columns, and with units that move."""

from __future__ import annotations

import copy
import dataclasses
import functools

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import zeroresize as zr
from zeroresize import ColumnParallelLinear, RowParallelLinear
from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.migration.lender import Lender
from zeroresize.optim.optimizers import states_like
from zeroresize.plan.layer import LayerPlan
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.policy.tensor.columns.order import num_lent
from zeroresize.policy.tensor.rules.sharing import loans_of

IN, HIDDEN, OUT = 12, 24, 18  # all divide by 2 and by 3 ranks

#: How far a result may be from one that adds the same numbers in another order.
TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-5},
}

bf16_autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def close(actual, expected, precision=None):
    """Of the same shape and dtype, and as near as ``precision`` (the own dtype by default) allows."""
    assert_close(actual, expected, **TOLERANCES[precision or expected.dtype])


def shard_of(whole, dim, group):
    """This rank's part of a tensor."""
    return whole.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def randn(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def seeded_linear(in_features=IN, out_features=OUT, bias=True, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(in_features, out_features, bias=bias, dtype=dtype)


def plan_keeping(keep, num_columns, imputation="zero"):
    pruned = [column for column in range(num_columns) if column not in keep]
    return LayerPlan.from_pruned(torch.tensor(pruned, dtype=torch.int64), num_columns, imputation=imputation)


class Comparison:
    """A whole ``nn.Linear`` and this rank's part of it, given the same input and the same dy."""

    def __init__(self, kind, linear, group, **options):
        self.kind, self.linear, self.group = kind, linear, group
        layer_class = ColumnParallelLinear if kind == "column" else RowParallelLinear
        self.layer = layer_class.from_linear(linear, process_group=group, **options)
        self.splits_x = kind == "row" and options.get("input_is_parallel", True)
        self.splits_y = kind == "column" and not options.get("gather_output", False)

    def forward(self, *leading, dtype=None, seed=1, x_learns=True):
        x = randn(*leading, IN, seed=seed, dtype=dtype or self.linear.weight.dtype)
        self.x = x.clone().requires_grad_(x_learns)
        self.own_x = (shard_of(x, -1, self.group) if self.splits_x else x).clone().requires_grad_(x_learns)
        self.y, self.own_y = self.linear(self.x), self.layer(self.own_x)

    def backward(self, seed=2):
        """Gradients add up in the parameters as they always do."""
        dy = randn(*self.y.shape, seed=seed, dtype=self.y.dtype)
        self.y.backward(dy)
        self.own_y.backward(shard_of(dy, -1, self.group) if self.splits_y else dy)

    def assert_close(self, precision=None):
        """What this rank holds is its part of what the whole layer has, and where that has nothing, nothing."""
        layer, linear = self.layer, self.linear
        for own_tensor, whole, split_dim in [
            (self.own_y, self.y, -1 if self.splits_y else None),
            (self.own_x.grad, self.x.grad, -1 if self.splits_x else None),
            (layer.weight.grad, linear.weight.grad, 0 if self.kind == "column" else 1),
            (
                getattr(layer.bias, "grad", None),
                getattr(linear.bias, "grad", None),
                0 if self.kind == "column" else None,
            ),
        ]:
            if whole is None:
                assert own_tensor is None
            else:
                close(own_tensor, whole if split_dim is None else shard_of(whole, split_dim, self.group), precision)


LAYERS = {
    "column": ("column", {}),
    "column, y gathered": ("column", {"gather_output": True}),
    "row": ("row", {}),
    "row, x whole": ("row", {"input_is_parallel": False}),
}

#: Columns that each rank keeps of the pair's two layers; the third rank computes in full.
KEEPS = [([0, 3, 4, 11], [1, 2]), ([2], [0, 3, 5, 7]), (None, None)]


class PrunedPair:
    """Column-parallel → GELU → row-parallel with a plan on every rank, beside the same with masked whole weights.

    Masked weights are what zero imputation means: with w ⊙ mask in place of w, y and dx lack the terms of the pruned
    columns, and dw is zero there.
    """

    def __init__(self, group, dtype=torch.float32, imputation="zero"):
        self.group = group
        num_ranks = dist.get_world_size(group)
        self.fc1, self.fc2 = seeded_linear(IN, HIDDEN, dtype=dtype), seeded_linear(HIDDEN, OUT, dtype=dtype, seed=1)
        self.model = nn.Sequential(
            ColumnParallelLinear.from_linear(self.fc1, process_group=group),
            nn.GELU(),
            RowParallelLinear.from_linear(self.fc2, process_group=group),
        )
        columns = [IN, HIDDEN // num_ranks]
        keeps = [[kept or range(k) for kept, k in zip(pair, columns, strict=True)] for pair in KEEPS[:num_ranks]]
        masks = [[mask(kept, k) for kept, k in zip(pair, columns, strict=True)] for pair in keeps]
        self.mask1 = torch.cat([mask1.expand(HIDDEN // num_ranks, -1) for mask1, _ in masks])
        self.mask2 = torch.cat([mask2 for _, mask2 in masks])
        own_layers, own_keeps = (self.model[0], self.model[2]), KEEPS[dist.get_rank(group)]
        for layer, kept, num_columns in zip(own_layers, own_keeps, columns, strict=True):
            layer.plan = None if kept is None else plan_keeping(kept, num_columns, imputation)

    def masked(self, x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(x, self.fc1.weight * self.mask1, self.fc1.bias))
        return F.linear(hidden, self.fc2.weight * self.mask2, self.fc2.bias)

    def whole(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))

    def gradients(self, function, *shape, seed=1) -> list[Tensor]:
        """y, dx and the gradients of all parameters, which are taken away again."""
        x = randn(*shape, IN, seed=seed, dtype=self.fc1.weight.dtype).requires_grad_()
        y = function(x)
        y.backward(randn(*y.shape, seed=2, dtype=y.dtype))
        both = [*self.model.parameters(), *self.fc1.parameters(), *self.fc2.parameters()]
        parameters = [parameter for parameter in both if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return [y.detach(), x.grad, *gradients]

    def assert_equals(self, function, precision=None):
        y, dx, dw1, db1, dw2, db2 = self.gradients(function, 4, 5)
        own_results = self.gradients(self.model, 4, 5)
        parts = [y, dx, shard_of(dw1, 0, self.group), shard_of(db1, 0, self.group), shard_of(dw2, 1, self.group), db2]
        for own_result, part in zip(own_results, parts, strict=True):
            close(own_result, part, precision)


PAIR_IN, PAIR_HIDDEN = 24, 36  # divide by 2, 3 and 4 ranks


def equal_loans(ratios, num_ranks):
    """Equal parts for all receivers; ``ratios`` is {owner: γ}."""
    return loans_of([ratios.get(rank, 0.0) for rank in range(num_ranks)])


def lend(layers, group, loans, migration_transport, seed=0, lender=None):
    """Put ``loans`` in force; the owners lend columns drawn at random."""
    lender = lender or Lender(layers, group, migration_transport)
    rank = dist.get_rank(group)
    own_loan = next((loan for loan in loans if loan.owner == rank), None)
    lent = {}
    for position, (name, layer) in enumerate(layers.items()):
        layer.plan = None
        if own_loan is not None:
            generator = torch.Generator().manual_seed(100 * seed + 10 * rank + position)
            order = torch.randperm(layer.num_columns, generator=generator)
            lent[name] = order[: num_lent(layer.num_columns, own_loan.share)]
            none = torch.empty(0, dtype=torch.int64)
            layer.plan = LayerPlan.from_pruned(none, layer.num_columns, lent=lent[name])
    lender.install(loans, lent, epoch=seed)
    lender.send_weights()
    return lender


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


class Pair(nn.Module):
    """Column-parallel, GELU, row-parallel, and the same from whole layers."""

    def __init__(self, group, dtype, layers=2):
        super().__init__()
        torch.manual_seed(0)
        whole = [(nn.Linear(PAIR_IN, PAIR_HIDDEN), nn.Linear(PAIR_HIDDEN, PAIR_IN)) for _ in range(layers)]
        self.whole = nn.ModuleList(layer for pair in whole for layer in pair).to(dtype)
        self.parallel = nn.ModuleList(
            (zr.ColumnParallelLinear if i % 2 == 0 else zr.RowParallelLinear).from_linear(layer, process_group=group)
            for i, layer in enumerate(self.whole)
        )
        self.checkpoints = False

    def run(self, layers, x):
        for up, down in zip(layers[::2], layers[1::2], strict=True):
            body = lambda x, up=up, down=down: x + down(torch.nn.functional.gelu(up(x)))  # noqa: E731
            x = checkpoint(body, x, use_reentrant=False) if self.checkpoints else body(x)
        return x

    def layers(self):
        return {str(i): layer for i, layer in enumerate(self.parallel)}

    def worst_error(self, group):
        """Of all parameters' gradients, relative to the whole layers'."""
        errors = []
        for i, (layer, whole) in enumerate(zip(self.parallel, self.whole, strict=True)):
            errors.append(relative_error(layer.weight.grad, shard_of(whole.weight.grad, i % 2, group)))
            bias = shard_of(whole.bias.grad, 0, group) if i % 2 == 0 else whole.bias.grad
            errors.append(relative_error(layer.bias.grad, bias))
        return max(errors)


WIDTH, NEURONS, HEADS, HEAD_SIZE = 8, 24, 12, 2


class Attention(nn.Module):
    def __init__(self, group):
        super().__init__()
        # A bias of k has no gradient but for rounding, which some optimizers make large.
        biases = (True, False, True)
        whole = [nn.Linear(WIDTH, HEADS * HEAD_SIZE, bias=bias, dtype=torch.float64) for bias in biases]
        self.q, self.k, self.v = (ColumnParallelLinear.from_linear(one, process_group=group) for one in whole)
        out = nn.Linear(HEADS * HEAD_SIZE, WIDTH, dtype=torch.float64)
        self.out = RowParallelLinear.from_linear(out, process_group=group)
        self.num_heads = HEADS // dist.get_world_size(group)

    def forward(self, x):
        q, k, v = (
            layer(x).view(*x.shape[:-1], self.num_heads, HEAD_SIZE).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = (q @ k.transpose(-1, -2) / HEAD_SIZE**0.5).softmax(dim=-1)
        return x + self.out((scores @ v).transpose(1, 2).reshape(*x.shape[:-1], self.num_heads * HEAD_SIZE))


class FeedForward(nn.Module):
    def __init__(self, group):
        super().__init__()
        up, down = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((WIDTH, NEURONS), (NEURONS, WIDTH)))
        self.up = ColumnParallelLinear.from_linear(up, process_group=group)
        self.down = RowParallelLinear.from_linear(down, process_group=group)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def block(group, seed=0):
    """The same whole model on every rank and at every call."""
    torch.manual_seed(seed)
    last = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    return nn.Sequential(Attention(group), FeedForward(group), last).train()


def segments_of(model, group):
    """As its conversion would find them: ``"0.out"`` of 12 heads and ``"1.down"`` of 24 neurons."""
    attention, feed_forward, _ = model
    ranks = dist.get_world_size(group)

    def follow(heads):
        attention.num_heads = len(heads)

    heads, neurons = [], []
    for name in "qkv":
        layer = getattr(attention, name)
        kinds = [kind for kind, _ in layer.named_parameters()]
        heads += [UnitTensor(layer, kind, f"0.{name}.{kind}", 0, (HEAD_SIZE,)) for kind in kinds]
    heads.append(UnitTensor(attention.out, "weight", "0.out.weight", 1, (HEAD_SIZE,)))
    neurons += [UnitTensor(feed_forward.up, kind, f"1.up.{kind}", 0, (1,)) for kind in ("weight", "bias")]
    neurons.append(UnitTensor(feed_forward.down, "weight", "1.down.weight", 1, (1,)))
    layers = ("0.q", "0.k", "0.v", "0.out"), ("1.up", "1.down")
    return [
        OwnedSegment("0.out", "heads", layers[0], tuple(heads), OwnershipMap.home(HEADS, ranks), on_change=follow),
        OwnedSegment("1.down", "neurons", layers[1], tuple(neurons), OwnershipMap.home(NEURONS, ranks)),
    ]


def uneven(num_ranks, turn=0):
    """Targets by name: the first rank keeps little, its neighbours take; with ``turn`` 1 the last rank has nothing."""
    if turn == 0:
        owners = {
            "0.out": [1, *[HEADS // num_ranks] * (num_ranks - 2), 2 * HEADS // num_ranks - 1],
            "1.down": [3, *[NEURONS // num_ranks] * (num_ranks - 2), 2 * NEURONS // num_ranks - 3],
        }
        return {name: OwnershipMap.home(sum(counts), num_ranks).with_counts(counts) for name, counts in owners.items()}
    generator = np.random.default_rng(turn)
    return {
        name: OwnershipMap(generator.integers(max(num_ranks - 1, 1), size=number), num_ranks)
        for name, number in (("0.out", HEADS), ("1.down", NEURONS))
    }


def home(num_ranks):
    return {"0.out": OwnershipMap.home(HEADS, num_ranks), "1.down": OwnershipMap.home(NEURONS, num_ranks)}


def whole_of(tensor, where, owned, group):
    """The undivided tensor, of the units of all ranks."""
    return from_units(gathered(tensor, where, owned, group), where)


def everything_of(segments, optimizer, group):
    """Weights, gradients and optimizer state of all units by name, as wholes."""
    tensors_of_all = {}
    for segment in segments:
        for where in segment.tensors:
            parameter = where.parameter
            tensors = {"": parameter}
            if parameter.grad is not None:
                tensors[" gradient"] = parameter.grad
            if optimizer is not None:
                like = {id(value) for value in states_like(optimizer, parameter)}
                state = optimizer.state.get(parameter, {})
                tensors |= {f" {key}": value for key, value in state.items() if id(value) in like}
            for kind, tensor in tensors.items():
                tensors_of_all[where.name + kind] = whole_of(tensor, where, segment.owned, group)
    return tensors_of_all


def held(segments, optimizer):
    """What this rank holds, to be compared with what it holds later: identities, and copies of all values."""
    objects, values = [], []
    for segment in segments:
        values.append(segment.owned.owners.copy())
        for where in segment.tensors:
            parameter = where.parameter
            state = optimizer.state.get(parameter) if optimizer is not None else None
            of_state = [] if state is None else [*state.values()]
            objects += [parameter, parameter.grad, state, *of_state]
            values += [copy.deepcopy(one) for one in (parameter.data, parameter.grad, *of_state)]
    return [one if one is None else id(one) for one in objects], values


def same(ones, others):
    """Whether two lists or dictionaries hold equal values, bit for bit."""
    if isinstance(ones, dict):
        assert ones.keys() == others.keys()
        ones, others = ones.values(), [others[name] for name in ones]
    return all(
        torch.equal(first, second) if isinstance(first, torch.Tensor) else np.array_equal(first, second)
        for first, second in zip(ones, others, strict=True)
    )


def by_unit(tensor, description, num_units):
    """[units, rows of all parts, ...] of a rank's share."""
    parts = tensor.detach().movedim(description.dim, 0).split([num_units * rows for rows in description.rows])
    by_part = zip(parts, description.rows, strict=True)
    return torch.cat([part.unflatten(0, (num_units, rows)) for part, rows in by_part], dim=1)


def from_units(by_units, description):
    """A rank's share, of what :func:`by_unit` makes of it."""
    parts = by_units.split(description.rows, dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts]).movedim(0, description.dim)


def gathered(tensor, description, owned, group):
    """[U, rows of all parts, ...] with the units of all ranks in ascending order."""
    num_units = len(description.held(owned, dist.get_rank(group)))
    own_part = by_unit(torch.zeros_like(description.parameter) if tensor is None else tensor, description, num_units)
    parts = [None] * owned.num_ranks
    dist.all_gather_object(parts, own_part, group=group)
    whole = own_part.new_empty(len(owned.owners) // description.block, *own_part.shape[1:])
    for rank, part in reversed(list(enumerate(parts))):  # the first rank that holds a block has its gradient
        whole[torch.from_numpy(description.held(owned, rank))] = part
    return whole


def hold(segment, owned, group):
    """Let every rank hold the units that ``owned`` gives it."""
    for description in segment.tensors:
        whole = gathered(description.parameter, description, segment.owned, group)
        mine = torch.from_numpy(description.held(owned, dist.get_rank(group)))
        part = from_units(whole[mine], description)
        description.parameter.data = part.clone(memory_format=torch.contiguous_format)
        description.parameter.grad = None
    segment.owned = owned
    segment.follow(dist.get_rank(group))


def uneven_maps(segment):
    """All kinds of them: nearly nothing, nothing on one rank, units that do not lie beside each other."""
    num_units, num_ranks = len(segment.owned.owners), segment.owned.num_ranks
    units = np.arange(num_units)
    owners = [
        (units > 0) * (num_ranks - 1),
        np.zeros_like(units),
        np.full_like(units, num_ranks - 1),
        units % num_ranks,
        num_ranks - 1 - units * num_ranks // num_units,
    ]
    return [dataclasses.replace(segment.owned, owners=of_units) for of_units in owners]


def results(model, segments, compute, group):
    """What ``compute(model)`` returns, and all gradients of its backward as if one rank had them."""
    model.zero_grad()
    y = compute(model)
    (y * torch.linspace(-1.0, 1.0, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    split = {one.name: (one, segment) for segment in segments for one in segment.tensors}
    tensors = {"y": y.detach()}
    for name, parameter in model.named_parameters():
        if name in split:
            description, segment = split[name]
            tensors[name] = gathered(parameter.grad, description, segment.owned, group)
        elif parameter.grad is not None:
            tensors[name] = parameter.grad.clone()
    return tensors


def assert_any_owner_computes_the_same(model, segments, compute, group):
    """In float64: every layout's y and gradients are those of even shares, and units that came home are bitwise so."""
    homes = [segment.owned for segment in segments]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    expected = results(model, segments, compute, group)
    for case in range(5):
        for segment in segments:
            hold(segment, uneven_maps(segment)[case], group)
        actual = results(model, segments, compute, group)
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_close(actual[name], tensor, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
    for segment, home in zip(segments, homes, strict=True):
        hold(segment, home, group)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), weights, strict=True))
    actual = results(model, segments, compute, group)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def mask(keep: list[int], num_columns: int) -> Tensor:
    """``kept_K`` of the list of kept columns."""
    return torch.tensor([column in keep for column in range(num_columns)])


def forward(x: Tensor, w_NK: Tensor, kept_K: Tensor) -> Tensor:
    """y = x[:, keep] w[:, keep]ᵀ: the terms of the other columns are missing from every sum."""
    return (x * kept_K) @ (w_NK * kept_K).T


def dgrad(dy: Tensor, w_NK: Tensor, kept_K: Tensor, imputation: str = "zero", last: Tensor | None = None) -> Tensor:
    """dx[:, keep] = dy w[:, keep], the rest imputed."""
    return impute(dy @ w_NK, kept_K, imputation, last)


def wgrad(dy: Tensor, x: Tensor, kept_K: Tensor, imputation: str = "zero", last: Tensor | None = None) -> Tensor:
    """dw[:, keep] = dyᵀ x[:, keep], the rest imputed."""
    return impute(torch.einsum("...n,...k->nk", dy, x), kept_K, imputation, last)


def impute(gradient: Tensor, kept_K: Tensor, imputation: str, last: Tensor | None) -> Tensor:
    """The whole ``gradient`` with its columns that are not kept replaced."""
    rest = torch.zeros_like(gradient)
    if imputation == "average":
        rest += (gradient * kept_K).sum(dim=-1, keepdim=True) / kept_K.sum()
    if imputation == "same" and last is not None and last.shape == gradient.shape:
        rest = last
    return torch.where(kept_K, gradient, rest)
