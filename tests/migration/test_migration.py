"""Migration is exact: with any loan a layer gives the outputs and gradients of the whole ``nn.Linear``."""

import itertools

import pytest
import torch
import torch.distributed as dist
from helpers.parallel_layers import PAIR_IN, Comparison, Pair, equal_loans, lend, randn, shard_of
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from zeroresize.config.keys import MIGRATION_TRANSPORTS
from zeroresize.migration.transport import bounds_of_parts
from zeroresize.plan.group import Loan

pytestmark = pytest.mark.same_ranks

EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.mark.few(3)
@pytest.mark.parametrize("migration_transport", MIGRATION_TRANSPORTS)
@pytest.mark.parametrize(
    ("num_ranks", "owners"),
    [
        (2, [0]),
        (3, [0, 2]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(3, [1]), (4, [2]), (4, [0, 3])]),
    ],
)
@pytest.mark.parametrize("dtype", EXACT)
def test_training_is_exact_whoever_lends_how_much(run_ranks, migration_transport, num_ranks, owners, dtype):
    """Five optimizer steps with every γ, every other with checkpointing, the last of two micro-batches; other columns
    are lent from every other step on."""

    def train_lending(ratio, group):
        model = Pair(group, dtype)
        optimizers = [torch.optim.SGD(layers.parameters(), lr=0.01) for layers in (model.whole, model.parallel)]
        errors, lender = [], None
        loans = equal_loans(dict.fromkeys(owners, ratio), num_ranks)
        for step in range(5):
            lender = lend(model.layers(), group, loans, migration_transport, seed=step // 2, lender=lender)
            for micro_batch in range(2 if step == 4 else 1):
                model.checkpoints = (step + micro_batch) % 2 == 1
                x = randn(7, 3, PAIR_IN, seed=10 * step + micro_batch, dtype=dtype)
                losses = [model.run(layers, x).square().mean() for layers in (model.whole, model.parallel)]
                for loss in losses:
                    loss.backward()
                errors.append(abs(losses[1].item() - losses[0].item()) / losses[0].item())
            errors.append(model.worst_error(group))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return max(errors)

    def train(rank, group):
        return {ratio: train_lending(ratio, group) for ratio in (0.25, 0.5, 0.75, 1.0)}

    for by_ratio in run_ranks(train, num_ranks):
        for ratio, error in by_ratio.items():
            assert error <= EXACT[dtype], ratio


def test_only_what_is_asked_for_is_computed(run_ranks):
    def train(rank, group):
        for transport, kind, learns in itertools.product(MIGRATION_TRANSPORTS, ("column", "row"), ("x", "w", "x w")):
            torch.manual_seed(0)
            linear = nn.Linear(12, 18).double()
            linear.weight.requires_grad_("w" in learns)
            compared = Comparison(kind, linear, group)
            lender = lend({"layer": compared.layer}, group, equal_loans({1: 0.5}, 3), transport)
            compared.forward(5, x_learns="x" in learns)
            compared.backward()
            compared.assert_close()
            lender.close()

    run_ranks(train, 3)


@pytest.mark.parametrize("migration_transport", MIGRATION_TRANSPORTS)
def test_parts_may_be_uneven_and_empty_and_a_layer_used_twice(run_ranks, migration_transport):
    def train(rank, group):
        model = Pair(group, torch.float64, layers=1)
        lend(model.layers(), group, (Loan(1, 0.7, (2, 3, 0), (0.9, 0.0, 0.1)),), migration_transport)
        x = randn(5, PAIR_IN, dtype=torch.float64)
        for layers in (model.whole, model.parallel):
            model.run(layers, model.run(layers, x)).square().mean().backward()
        return model.worst_error(group)

    assert max(run_ranks(train, 4)) <= 1e-10


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_data_parallelism_sees_whole_gradients(run_ranks, reentrant):
    """DDP averages what is accumulated, and copies its buckets back: whatever came later would be lost."""

    def train(rank, group):
        alone = [dist.new_group([other]) for other in range(2)][rank]
        model, migration_transport = Pair(group, torch.float64), "broadcast-reduce"

        class Body(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = model.parallel

            def forward(self, x):
                if reentrant is None:
                    return model.run(self.layers, x)
                return checkpoint(model.run, self.layers, x, use_reentrant=reentrant)

        replicated = DistributedDataParallel(Body(), process_group=alone)
        lend(model.layers(), group, equal_loans({0: 0.5}, 2), migration_transport)
        x = randn(5, PAIR_IN, dtype=torch.float64).requires_grad_()
        for run in (lambda: model.run(model.whole, x), lambda: replicated(x)):
            run().square().mean().backward()
        return model.worst_error(group)

    assert max(run_ranks(train, 2)) <= 1e-10


def test_hooks_and_autograd_grad_see_whole_gradients(run_ranks):
    def train(rank, group):
        model = Pair(group, torch.float64)
        lend(model.layers(), group, equal_loans({0: 0.5}, 2), "broadcast-reduce")
        seen = []
        for layers in (model.whole, model.parallel):
            layers[0].weight.register_hook(lambda gradient: 2 * gradient)
            layers[1].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
        x = randn(5, PAIR_IN, dtype=torch.float64).requires_grad_()
        losses = [model.run(layers, x).square().mean() for layers in (model.whole, model.parallel)]
        of_x = [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in losses]
        assert_close(*of_x)
        of_weights = [
            torch.autograd.grad(loss, layers[0].weight, retain_graph=True)[0]
            for loss, layers in zip(losses, (model.whole, model.parallel), strict=True)
        ]
        assert_close(of_weights[1], shard_of(of_weights[0], 0, group))
        for loss in losses:
            loss.backward()
        assert_close(seen[1], shard_of(seen[0], 1, group))
        return model.worst_error(group)

    assert max(run_ranks(train, 2)) <= 1e-10


def test_after_a_backward_that_failed_on_every_rank_the_next_ones_are_exact(run_ranks):
    def train(rank, group):
        model = Pair(group, torch.float64)
        lender = lend(model.layers(), group, equal_loans({0: 0.5}, 2), "broadcast-reduce")
        errors = []

        def fail(gradient):
            raise KeyError("a hook")

        for step in range(4):
            x = randn(5, PAIR_IN, seed=step, dtype=torch.float64).requires_grad_()
            if step % 2 == 0:
                x.register_hook(fail)
                with pytest.raises(KeyError):
                    model.run(model.parallel, x).square().mean().backward()
                model.zero_grad()
            else:
                for layers in (model.whole, model.parallel):
                    model.run(layers, x).square().mean().backward()
                errors.append(model.worst_error(group))
                model.zero_grad()
            lender.send_weights()
        return max(errors)

    assert max(run_ranks(train, 2)) <= 1e-10


def test_evaluation_computes_in_full_and_a_forward_in_inference_mode_leaves_training_as_it_is(run_ranks):
    def train(rank, group):
        model = Pair(group, torch.float64)
        lender = lend(model.layers(), group, equal_loans({0: 0.5}, 2), "scatter-gather")
        x, moved = randn(5, PAIR_IN, dtype=torch.float64), lender.bytes_moved
        assert_close(model.eval().run(model.parallel, x), model.run(model.whole, x))
        assert lender.bytes_moved == moved
        model.train()
        with torch.inference_mode():
            model.run(model.parallel, x)
        for layers in (model.whole, model.parallel):
            model.run(layers, x).square().mean().backward()
        return model.worst_error(group)

    assert max(run_ranks(train, 2)) <= 1e-10


def test_weights_that_changed_after_they_were_sent_are_an_error(run_ranks):
    def train(rank, group):
        model = Pair(group, torch.float32)
        lend(model.layers(), group, equal_loans({0: 0.5}, 2), "broadcast-reduce")
        first = model.parallel[0]
        changes = (
            lambda: setattr(first.weight, "data", first.weight.clone()),
            lambda: first.weight.mul_(2.0),
            lambda: setattr(first, "weight", nn.Parameter(first.weight)),
        )
        for change in changes:
            with torch.no_grad():
                change()
            with pytest.raises(RuntimeError, match="layer 0 changed after its columns were lent"):
                model.run(model.parallel, randn(5, PAIR_IN))

    run_ranks(train, 2)


@given(st.integers(1, 5000), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9).filter(sum))
def test_parts_cover_the_slice_once(num_columns, weights):
    parts = [weight / sum(weights) for weight in weights]
    bounds = bounds_of_parts(num_columns, parts)
    assert len(bounds) == len(parts) + 1 and bounds[0] == 0 and bounds[-1] == num_columns
    assert all(low <= high for low, high in itertools.pairwise(bounds))
    unit = 8 if num_columns >= 160 * len(parts) else 1
    for (low, high), part in zip(itertools.pairwise(bounds), parts, strict=True):
        assert abs((high - low) - part * num_columns) <= unit + 1e-6
