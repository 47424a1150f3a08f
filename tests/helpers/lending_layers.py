"""Layers that lend columns to other ranks, beside the whole ones that they must equal."""

import torch
import torch.distributed as dist
from parallel_layers import own
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroresize as zr
from zeroresize.migration.lender import Lender
from zeroresize.plan.layer import LayerPlan
from zeroresize.policy.tensor.columns.order import num_lent
from zeroresize.policy.tensor.rules.sharing import loans_of

IN, HIDDEN = 24, 36  # divide by 2, 3 and 4 ranks


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
        whole = [(nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, IN)) for _ in range(layers)]
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
            errors.append(relative_error(layer.weight.grad, own(whole.weight.grad, i % 2, group)))
            bias = own(whole.bias.grad, 0, group) if i % 2 == 0 else whole.bias.grad
            errors.append(relative_error(layer.bias.grad, bias))
        return max(errors)
