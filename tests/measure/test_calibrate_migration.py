"""The calibration of migrating counts what a step of training moves."""

import logging
import re
import types

import pytest
import torch
from helpers.parallel_layers import randn
from helpers.processes import for_each
from torch.utils.checkpoint import checkpoint

import zeroresize as zr
from zeroresize.config.keys import MIGRATION_TRANSPORTS
from zeroresize.measure import calibration
from zeroresize.migration.lender import make_transport

IN, HIDDEN, TOKENS, LENT = 24, 48, 10, 0.75


def calibrated_bytes(layers, group, migration_transport):
    """Of the step that these layers have seen: the calibration on a clock that only what arrives at this rank moves."""
    transports = []

    def make_watched_transport(*args):
        transports.append(make_transport(*args))
        return transports[-1]

    calibration.make_transport = make_watched_transport
    calibration.time = types.SimpleNamespace(perf_counter=lambda: transports[-1].bytes_moved)
    return calibration.measure_migration_cost(layers, group, migration_transport).seconds([LENT])


@pytest.mark.few(4)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("migration_transport", MIGRATION_TRANSPORTS)
def test_it_counts_what_a_step_moves_whether_forwards_are_recomputed_or_not(run_ranks, migration_transport, num_ranks):
    @for_each([(None,), (False,), (True,)])
    def count(rank, group, use_reentrant):
        up = zr.ColumnParallelLinear(IN, HIDDEN, process_group=group)
        down = zr.RowParallelLinear(HIDDEN, IN, process_group=group)
        config = zr.BalanceConfig(mode="mig", ratio=LENT, ranks=[0], migration_transport=migration_transport)
        model = zr.convert(torch.nn.Sequential(up, down), process_group=group)
        balancer = zr.Balancer(model, torch.optim.SGD(model.parameters()), process_group=group, config=config)
        for micro_batch in range(2):
            x = randn(TOKENS, IN, seed=micro_batch).requires_grad_()
            y = model(x) if use_reentrant is None else checkpoint(model, x, use_reentrant=use_reentrant)
            y.square().sum().backward()
        moved = balancer.bytes_migrated
        balancer.close()
        return moved, calibrated_bytes({"up": up, "down": down}, group, migration_transport)

    for results in zip(*run_ranks(count, num_ranks), strict=True):
        most = max(moved for moved, _ in results)
        assert [calibrated for _, calibrated in results] == [pytest.approx(most)] * num_ranks


@pytest.mark.parametrize(("mode", "measured"), [("zero-rd", ["pruning"]), ("semi", ["pruning", "migrating"])])
def test_one_line_of_one_rank_says_what_was_measured_and_what_for(run_ranks, mode, measured):
    def train(rank, group):
        said = []
        messages = logging.Handler()
        messages.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("zeroresize").addHandler(messages)
        logging.getLogger("zeroresize").setLevel(logging.INFO)
        up = zr.ColumnParallelLinear(IN, HIDDEN, process_group=group)
        config = zr.BalanceConfig(mode=mode, update_every=1)
        model = zr.convert(torch.nn.Sequential(up), process_group=group)
        balancer = zr.Balancer(model, torch.optim.SGD(model.parameters()), process_group=group, config=config)
        model(randn(TOKENS, IN)).square().sum().backward()
        balancer.step()
        balancer.close()
        return [line for line in said if "measured" in line or "calibration" in line]

    lines, of_other_rank = run_ranks(train, 2)
    assert of_other_rank == []
    (line,) = lines
    assert re.match(
        r"measured once, in \d+\.\d s, what it would cost to relieve a slow rank, to be weighed against waiting for "
        r"it: without \d+ % of its columns this rank's products take \d+ % of their time",
        line,
    )
    assert ("lending columns to other ranks takes " in line) == ("migrating" in measured)
