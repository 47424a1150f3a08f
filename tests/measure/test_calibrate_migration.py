"""The pre-test of migrating counts what a step of training moves."""

import logging
import types

import pytest
import torch
from parallel_layers import randn
from torch.utils.checkpoint import checkpoint

import zeroresize as zr
from zeroresize.config_keys import MIGRATIONS
from zeroresize.measure import calibrate_migration
from zeroresize.migration.carriers import make_carrier

IN, HIDDEN, TOKENS, LENT = 24, 48, 10, 0.75


def pretested_bytes(layers, group, migrate):
    """Of the step that these layers have seen: the pre-test on a clock that only what arrives at this rank moves."""
    carriers = []

    def make_watched_carrier(*args):
        carriers.append(make_carrier(*args))
        return carriers[-1]

    calibrate_migration.make_carrier = make_watched_carrier
    calibrate_migration.time = types.SimpleNamespace(perf_counter=lambda: carriers[-1].bytes_moved)
    return calibrate_migration.measure_migration_cost(layers, group, migrate).seconds([LENT])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("migrate", MIGRATIONS)
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["whole", "checkpointed", "checkpointed reentrant"])
def test_it_counts_what_a_step_moves_whether_forwards_are_recomputed_or_not(
    run_ranks, use_reentrant, migrate, num_ranks
):
    def count(rank, group):
        up = zr.ColumnParallelLinear(IN, HIDDEN, process_group=group)
        down = zr.RowParallelLinear(HIDDEN, IN, process_group=group)
        config = zr.BalanceConfig(mode="mig", ratio=LENT, ranks=[0], migrate=migrate)
        model = zr.convert(torch.nn.Sequential(up, down), process_group=group, config=config)
        balancer = zr.Balancer(model, torch.optim.SGD(model.parameters()), process_group=group, config=config)
        for micro_batch in range(2):
            x = randn(TOKENS, IN, seed=micro_batch).requires_grad_()
            y = model(x) if use_reentrant is None else checkpoint(model, x, use_reentrant=use_reentrant)
            y.square().sum().backward()
        moved = balancer.bytes_migrated
        balancer.close()
        return moved, pretested_bytes({"up": up, "down": down}, group, migrate)

    results = run_ranks(count, num_ranks)
    most = max(moved for moved, _ in results)
    assert [pretested for _, pretested in results] == [pytest.approx(most)] * num_ranks


@pytest.mark.parametrize(("mode", "measured"), [("zero-rd", ["pruning"]), ("semi", ["pruning", "migrating"])])
def test_it_says_that_it_begins_and_what_it_found(run_ranks, mode, measured):
    def train(rank, group):
        said = []
        messages = logging.Handler()
        messages.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("zeroresize").addHandler(messages)
        logging.getLogger("zeroresize").setLevel(logging.INFO)
        up = zr.ColumnParallelLinear(IN, HIDDEN, process_group=group)
        config = zr.BalanceConfig(mode=mode, update_every=1)
        model = zr.convert(torch.nn.Sequential(up), process_group=group, config=config)
        balancer = zr.Balancer(model, torch.optim.SGD(model.parameters()), process_group=group, config=config)
        model(randn(TOKENS, IN)).square().sum().backward()
        balancer.step()
        balancer.close()
        return [line for line in said if line.startswith("pre-test")]

    for first, *found in run_ranks(train, 2):
        assert first.startswith("pre-tests on the shapes of this step")
        assert [line.partition(":")[0] for line in found] == [f"pre-test of {what}" for what in measured]
