"""Ranks that prune, lend and borrow at once: losses and gradients lack the pruned columns, and nothing else.

With w ⊙ mask in place of the whole weight w, y and dx lack the terms of the columns that the mask leaves out, and dw is
zero there: what zero imputation means.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers.parallel_layers import PAIR_IN, Pair, equal_loans, randn

from zeroresize.config.keys import MIGRATION_TRANSPORTS
from zeroresize.migration.lender import Lender
from zeroresize.plan.group import Loan
from zeroresize.plan.layer import LayerPlan
from zeroresize.policy.tensor.columns.order import num_lent

#: Of every rank: the shares that it prunes and lends; and the loans, None for equal parts of all who lend nothing.
SETTINGS = {
    "one prunes and borrows": ([(0.0, 0.5), (0.25, 0.0), (0.0, 0.0)], None),
    "all who borrow prune": ([(0.5, 0.0), (0.0, 1.0), (0.75, 0.0)], None),
    "of two owners": ([(0.0, 0.5), (0.5, 0.0), (0.25, 0.0), (0.0, 0.75)], None),
    "owners prune, too": ([(0.25, 0.5), (0.5, 0.0), (0.0, 0.0), (0.5, 0.25)], None),
    "owners borrow, too": (
        [(0.25, 0.5), (0.25, 0.5), (0.5, 0.0)],
        (Loan(0, 0.5, (1, 2), (0.5, 0.5)), Loan(1, 0.5, (2, 0), (0.25, 0.75))),
    ),
}


def columns_of(rank, position, num_columns, pruned, lent):
    """(pruned, lent) columns of a layer, drawn at random."""
    order = torch.randperm(num_columns, generator=torch.Generator().manual_seed(10 * rank + position))
    return order[: round(pruned * num_columns)].sort().values, order[num_columns - num_lent(num_columns, lent) :]


def whole_mask(pruned_of_ranks, whole, is_row_parallel):
    """[N, K] of the whole layer, or [K] where its columns are split, from the columns that each rank prunes."""
    num_ranks = len(pruned_of_ranks)
    num_rows, num_columns = whole.shape
    masks = []
    for pruned in pruned_of_ranks:
        mask = torch.ones(num_columns // num_ranks if is_row_parallel else num_columns, dtype=whole.dtype)
        mask[pruned] = 0.0
        masks.append(mask if is_row_parallel else mask.expand(num_rows // num_ranks, -1))
    return torch.cat(masks)


@pytest.mark.few(3)
@pytest.mark.parametrize("migration_transport", MIGRATION_TRANSPORTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_only_pruned_columns_are_missing(run_ranks, migration_transport, setting):
    shares, loans = SETTINGS[setting]
    loans = loans or equal_loans({rank: lent for rank, (_, lent) in enumerate(shares)}, len(shares))

    def train(rank, group):
        model, lent_columns, masked = Pair(group, torch.float64), {}, []
        for position, (name, layer) in enumerate(model.layers().items()):
            columns = [columns_of(other, position, layer.num_columns, *shares[other]) for other in range(len(shares))]
            pruned, lent_columns[name] = columns[rank]
            layer.plan = LayerPlan.from_pruned(pruned, layer.num_columns, lent=lent_columns[name])
            whole = model.whole[position]
            mask = whole_mask([pruned for pruned, _ in columns], whole.weight, is_row_parallel=position % 2 == 1)
            masked.append(lambda x, whole=whole, mask=mask: F.linear(x, whole.weight * mask, whole.bias))
        lender = Lender(model.layers(), group, migration_transport)
        lender.install(loans, lent_columns)
        optimizer, errors = torch.optim.SGD(model.parameters(), lr=0.05), []
        for step in range(3):
            lender.send_weights()
            for micro_batch in range(2):
                model.checkpoints = micro_batch == 1
                x = randn(5, PAIR_IN, seed=2 * step + micro_batch, dtype=torch.float64)
                losses = [model.run(layers, x).square().mean() for layers in (masked, model.parallel)]
                for loss in losses:
                    loss.backward()
                errors.append(abs(losses[1].item() / losses[0].item() - 1.0))
            errors.append(model.worst_error(group))
            optimizer.step()
            optimizer.zero_grad()
        return max(errors)

    assert max(run_ranks(train, len(shares))) <= 1e-10
