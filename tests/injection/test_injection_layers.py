"""Injected slowness of balanced layers: where delays come, whom they reach, and what they leave behind."""

import time

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from torch import nn

from zeroresize.injection import StragglerInjector, round_robin, static
from zeroresize.injection.schedule import checked_chi
from zeroresize.kernels.probe import ProductProbe
from zeroresize.layers.linear import ColumnParallelLinear, RowParallelLinear


class Recorder(ProductProbe):
    """Sums the wall time of gemms as they look from where it stands."""

    def __init__(self):
        self.gemm_s = 0.0

    def gemm_begins(self, operands):
        self._gemm = time.perf_counter()

    def gemm_ends(self, operands):
        self.gemm_s += time.perf_counter() - self._gemm


def mlp(group, in_features=8, hidden=16):
    torch.manual_seed(0)
    return nn.Sequential(
        ColumnParallelLinear.from_linear(nn.Linear(in_features, hidden), process_group=group),
        nn.GELU(),
        RowParallelLinear.from_linear(nn.Linear(hidden, in_features), process_group=group),
    )


def train_step(model, num_features=8, num_tokens=4):
    x = torch.linspace(-1, 1, num_tokens * num_features).view(num_tokens, num_features).requires_grad_()
    model(x).square().sum().backward()
    return x.grad


@on_ranks(1)
def test_wrong_arguments_are_named(rank, group):
    model = mlp(group)
    for arguments, message in [
        ({"process_group": None, "chi": {0: 2.0}}, "process_group=None"),
        ({}, "chi=None, schedule=None: exactly one"),
        ({"chi": {0: 2.0}, "schedule": round_robin()}, "exactly one"),
        ({"chi": {1: 2.0}}, "rank 1"),
        ({"schedule": static({3: 2.0})}, "rank 3"),
        ({"chi": {0: 2.0}, "scope": "half"}, "scope='half' is not allowed: 'gemm' or 'all' is needed"),
    ]:
        with pytest.raises(ValueError, match=message):
            StragglerInjector(model, **{"process_group": group, **arguments})
    for empty in (nn.Sequential(nn.LayerNorm(4), nn.GELU()), nn.Embedding(4, 4)):
        with pytest.raises(ValueError, match="no linear layers"):
            StragglerInjector(empty, process_group=group, chi={0: 2.0})


@on_ranks(1)
def test_real_products_take_chi_times_as_long(rank, group):
    num_tokens = 512
    layer = ColumnParallelLinear(512, 512, process_group=group)
    inside, outside = Recorder(), Recorder()
    layer.probes.add_outermost(outside)
    with StragglerInjector(layer, process_group=group, chi={0: 3.0}) as injector:
        layer.probes.add_innermost(inside)
        for _ in range(12):
            train_step(layer, 512, num_tokens)
    assert injector.num_products == 3 * 12
    assert outside.gemm_s / inside.gemm_s == pytest.approx(3.0, rel=0.15)


@on_ranks(2)
def test_only_stragglers_are_slowed_as_chi_or_a_schedule_says_and_results_stay_bitwise(rank, group):
    model, counts = mlp(group), []
    expected = train_step(model)

    def count(injector):
        before = injector.num_products
        assert torch.equal(train_step(model), expected)
        counts.append(injector.num_products - before)

    with StragglerInjector(model, process_group=group, schedule=round_robin(chi=2.0)) as injector:
        for epoch in range(3):
            injector.set_epoch(epoch)
            assert injector.chi == {epoch % 2: 2.0}
            count(injector)
        injector.set_chi({})
        count(injector)
        injector.set_chi({0: 2.0, 1: 1.5})
        count(injector)
        with pytest.raises(ValueError, match="rank 2"):
            injector.set_chi({2: 2.0})
        assert injector.chi == {0: 2.0, 1: 1.5}
    with StragglerInjector(model, process_group=group, chi={1: 2.0, 0: 0}) as injector:
        count(injector)
        injector.set_epoch(1)  # which changes nothing without a schedule
        assert injector.chi == {1: 2.0, 0: 1.0}
        model.eval()(torch.ones(4, 8))
        counts.append(injector.num_products)
    assert gathered(group, counts) == [[6, 0, 6, 0, 6, 0, 0], [0, 6, 0, 0, 6, 6, 8]]


@on_ranks(1)
def test_exit_leaves_the_layers_as_they_were(rank, group):
    model = mlp(group)
    injector = StragglerInjector(model, process_group=group, chi={0: 2.0})
    with pytest.raises(KeyError), injector:
        with pytest.raises(RuntimeError, match="active already"):
            injector.__enter__()
        raise KeyError
    train_step(model)
    assert injector.num_products == 0
    with injector:  # it can be used again
        train_step(model)
    assert injector.num_products == 6


def test_schedules_say_who_is_slow_and_wrong_chi_is_named():
    schedule = round_robin(chi=3.0)
    assert [schedule(epoch, 3) for epoch in range(4)] == [{0: 3.0}, {1: 3.0}, {2: 3.0}, {0: 3.0}]
    assert static({0: 8, 1: 6})(5, 2) == {0: 8, 1: 6}
    assert checked_chi({0: 0, 1: 2.5}, 2) == {0: 1.0, 1: 2.5}  # 0 means 1
    for chi, message in [
        ({2: 4.0}, r"chi=\{2: 4.0\}: rank 2 .* allowed are 0 to 1"),
        ({"0": 4.0}, "rank '0'"),
        ({0: 0.5}, r"chi=\{0: 0.5\} is not allowed.*at least 1"),
        ({0: float("nan")}, "finite"),
        ({0: True}, "finite"),
        (4.0, "mapping of rank to χ"),
    ]:
        with pytest.raises(ValueError, match=message):
            checked_chi(chi, 2)
