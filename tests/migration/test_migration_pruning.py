"""Ranks that prune, lend and borrow at once: losses and gradients lack the pruned columns, and nothing else.

With w ⊙ mask in place of the whole weight w, y and dx lack the terms of the columns that the mask leaves out, and dw is
zero there: what zero imputation means.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.parallel_layers import PAIR_IN, Pair, equal_loans, randn, relative_error, shard_of
from helpers.virtual_training import FEATURES, Run

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


def gathered(tensor, dim, group):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return torch.cat(parts, dim)


def masked_loss_and_gradients(run, group):
    """The loss, and this rank's part of dw of both layers, by whole weights without the columns pruned now."""
    weights, masks = [], []
    for layer, dim in ((run.model.up, 0), (run.model.down, 1)):
        pruned = [None] * dist.get_world_size(group)
        dist.all_gather_object(pruned, [] if layer.plan is None else layer.plan.pruned.tolist(), group=group)
        weights.append(gathered(layer.weight, dim, group).requires_grad_())
        masks.append(whole_mask(pruned, weights[-1], is_row_parallel=dim == 1))
    hidden = F.linear(run.x, weights[0] * masks[0], gathered(run.model.up.bias, 0, group))
    y = run.x + F.linear(F.gelu(hidden), weights[1] * masks[1], run.model.down.bias.detach())
    loss = y.square().mean()
    loss.backward()
    return loss.item(), [shard_of(weight.grad, dim, group) for dim, weight in enumerate(weights)]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("migration_transport", MIGRATION_TRANSPORTS)
def test_by_the_papers_rule_a_straggler_that_only_prunes_borrows(run_ranks, migration_transport):
    """λ = 1 of ν = 2 stragglers migrates, and every rank that does not receives (Eq. (3))."""

    def train(rank, group):
        torch.set_default_dtype(torch.float64)
        config = {"paper": {"semi_rule": "paper", "num_migrating": 1}, "priority": "variation", "update_every": 5}
        run = Run(group, mode="semi", migration_transport=migration_transport, **config)
        run.x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(1))
        run.time.chi = (8.0, 3.0, 1.0)[rank]
        errors, at_once = [], 0
        for _ in range(40):
            run.time.now += 0.01
            expected_loss, expected = masked_loss_and_gradients(run, group)
            loss = run.model(run.x).square().mean()
            loss.backward()
            gradients = [run.model.up.weight.grad, run.model.down.weight.grad]
            errors += [relative_error(*pair) for pair in zip(gradients, expected, strict=True)]
            errors.append(abs(loss.item() / expected_loss - 1.0))
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.balancer.step()
            shares = [run.balancer.metrics()[f"balance/{name}_share"] for name in ("pruned", "lent", "borrowed")]
            at_once += [share > 0.0 for share in shares] == [True, False, True]
        return max(errors), at_once, [(loan.owner, loan.receivers) for loan in run.balancer.plan.loans]

    for rank, (error, at_once, loans) in enumerate(run_ranks(train, 3)):
        assert error <= 1e-10
        assert loans == [(0, (1, 2))]
        assert at_once >= 10 if rank == 1 else at_once == 0
