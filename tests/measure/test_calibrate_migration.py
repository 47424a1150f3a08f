"""The calibration of migrating counts what a step of training moves."""

import re
import types

import pytest
import torch
from helpers.parallel_layers import randn
from helpers.processes import caught_log_lines, for_each
from torch.utils.checkpoint import checkpoint

import zeroresize as zr
from zeroresize.config.keys import MIGRATION_TRANSPORTS
from zeroresize.measure import calibration
from zeroresize.migration.lender import make_transport

IN, HIDDEN, TOKENS, LENT = 24, 48, 10, 0.75


def balanced(layers, group, **config):
    model = zr.convert(torch.nn.Sequential(*layers), process_group=group)
    config = zr.BalanceConfig(**config)
    return model, zr.Balancer(model, torch.optim.SGD(model.parameters()), process_group=group, config=config)


@pytest.mark.slow
def test_it_counts_what_a_step_moves_whether_forwards_are_recomputed_or_not(run_ranks, monkeypatch):
    """On a clock that only what arrives at this rank moves."""
    transports = []

    def make_watched_transport(*args):
        transports.append(make_transport(*args))
        return transports[-1]

    monkeypatch.setattr(calibration, "make_transport", make_watched_transport)
    clock = types.SimpleNamespace(perf_counter=lambda: transports[-1].bytes_moved if transports else 0.0)
    monkeypatch.setattr(calibration, "time", clock)

    @for_each([(transport, again) for transport in MIGRATION_TRANSPORTS for again in (None, False, True)])
    def count(rank, group, transport, use_reentrant):
        layers = [
            zr.ColumnParallelLinear(IN, HIDDEN, process_group=group),
            zr.RowParallelLinear(HIDDEN, IN, process_group=group),
        ]
        model, balancer = balanced(layers, group, mode="mig", ratio=LENT, ranks=[0], migration_transport=transport)
        for micro_batch in range(2):
            x = randn(TOKENS, IN, seed=micro_batch).requires_grad_()
            y = model(x) if use_reentrant is None else checkpoint(model, x, use_reentrant=use_reentrant)
            y.square().sum().backward()
        moved = balancer.bytes_migrated
        balancer.close()
        by_name = {str(number): layer for number, layer in enumerate(layers)}
        return moved, calibration.measure_migration_cost(by_name, group, transport).seconds([LENT])

    for results in zip(*run_ranks(count, 3), strict=True):
        most = max(moved for moved, _ in results)
        assert [calibrated for _, calibrated in results] == [pytest.approx(most)] * 3


def test_one_line_of_one_rank_says_what_was_measured_and_what_for(run_ranks):
    @for_each([("zero-rd",), ("semi",)])
    def train(rank, group, mode):
        layers = [zr.ColumnParallelLinear(IN, HIDDEN, process_group=group)]
        with caught_log_lines() as said:
            model, balancer = balanced(layers, group, mode=mode, update_every=1)
            model(randn(TOKENS, IN)).square().sum().backward()
            balancer.step()
        balancer.close()
        return [line for line in said if "measured" in line or "calibration" in line]

    lines, of_other_rank = run_ranks(train, 2)
    assert of_other_rank == [[], []]
    for (line,), lends in zip(lines, (False, True), strict=True):
        assert re.match(
            r"measured once, in [\d.]+ m?s, what relieving a slow rank would cost: without \d+ % of its columns "
            r"its products take \d+ % of their time",
            line,
        )
        assert ("lending takes " in line) == lends
