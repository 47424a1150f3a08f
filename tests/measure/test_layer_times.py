"""How long each layer's products take: by the timer's marks, by real ranks, under loans and beside evaluation."""

import sys

import pytest
import torch
from helpers.virtual_training import FEATURES, Run
from torch import nn

import zeroresize as zr
from zeroresize.measure.step_timer import LayerTimer


def product(clock, probe, seconds):
    """Half of it multiplies."""
    probe.product_begins()
    clock.advance(seconds / 2)
    probe.gemm_begins(())
    clock.advance(seconds / 2)
    probe.gemm_ends(())
    probe.product_ends()


def test_each_layers_products_are_summed_and_make_up_those_of_all(clock, timer):
    up, down = LayerTimer(timer, "up"), LayerTimer(timer, "down")
    timer.begin_step()
    for probe, seconds in ((up, 1.0), (down, 2.0), (down, 4.0), (up, 8.0)):
        clock.advance(0.5)
        product(clock, probe, seconds)
    (times,) = timer.end_step()
    assert times.layers == {"up": 9.0, "down": 6.0}
    assert times.gemm_s + times.gather_fill_s == sum(times.layers.values())
    timer.begin_step()
    product(clock, down, 3.0)
    assert timer.end_step()[0].layers == {"down": 3.0}


def test_layers_take_no_more_marks_and_no_more_memory(clock, timer):
    """As many marks as without names, and sums that do not grow with the number of products."""
    probes = [LayerTimer(timer, f"layer {number}") for number in range(20)]
    timer.begin_step()
    for _ in range(5_000):
        for probe in probes:
            product(clock, probe, 0.5)
    assert len(timer._step.marks) < 10_000 and len(timer._step.layers) == 20
    num_marks = timer._step.num_marks
    timer.end_step()
    assert num_marks == 2 + 4 * 5_000 * 20
    assert sys.getsizeof(timer._unread) < 1_000 and not timer._unread


#: x without a gradient, so dx of the first layer is never computed; a product of all of a rank's columns in float32.
PRODUCT_S = 8 * FEATURES * 2 * FEATURES * 1e-6


def test_a_balancer_tells_the_times_of_its_layers(run_ranks):
    """In virtual time, so exactly: χ shows in every layer, and what a plan spares is not in it any more."""

    def train(rank, group):
        run = Run(group, chi={1: 4.0}, gather_s=0.0)
        times = [run.balancer.layer_times()]
        run.steps(2)
        times.append(run.balancer.layer_times())
        for _ in range(5):
            run.steps(run.config.update_every)
            times.append(run.balancer.layer_times())
        run.model.eval()
        run.model(run.x)
        run.model.train()
        run.steps(run.config.update_every)
        times.append(run.balancer.layer_times())
        return times, {name: len(columns) for name, columns in (run.pruned()).items() if columns is not None}

    (fast, _), (slow, pruned) = run_ranks(train, 2)
    for times in (fast, slow):
        assert times[:2] == [{}, {}], "nothing before the first update"
    for times_of_update in fast[2:]:
        assert times_of_update == pytest.approx({"up": 2 * PRODUCT_S, "down": 3 * PRODUCT_S})
    assert slow[2] == pytest.approx({"up": 8 * PRODUCT_S, "down": 12 * PRODUCT_S})
    kept = {"up": 1 - pruned["up"] / FEATURES, "down": 1 - pruned["down"] / (2 * FEATURES)}
    assert max(kept.values()) < 0.5
    for times_of_update in slow[-2:]:  # the evaluation in between took no part
        assert times_of_update == pytest.approx(
            {"up": 8 * PRODUCT_S * kept["up"], "down": 12 * PRODUCT_S * kept["down"]}
        )


def test_what_a_receiver_computes_for_others_is_in_its_layers_times(run_ranks):
    def train(rank, group):
        run = Run(group, gather_s=0.0, mode="mig", ratio=0.5, ranks=[1])
        run.steps(2 * run.config.update_every)
        return run.balancer.layer_times()

    receiver, owner = run_ranks(train, 2)
    for name, products in (("up", 2), ("down", 3)):
        assert owner[name] == pytest.approx(0.5 * products * PRODUCT_S)
        assert receiver[name] == pytest.approx(1.5 * products * PRODUCT_S)


def test_real_products_take_the_longer_the_larger_their_layer(run_ranks):
    """Sixteen times the work, in the quickest of some intervals: other work on the machine only adds time."""

    def train(rank, group):
        torch.manual_seed(0)
        config = zr.BalanceConfig(mode="off", update_every=2)
        model = nn.Sequential(
            zr.ColumnParallelLinear(256, 2048, process_group=group),
            zr.RowParallelLinear(2048, 16, process_group=group),
        )
        model = zr.convert(model, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        balancer = zr.Balancer(model, optimizer, process_group=group, config=config)
        x = torch.randn(512, 256).requires_grad_()
        intervals = []
        for _ in range(8):
            for _ in range(config.update_every):
                model(x).sum().backward()
                optimizer.step()
                balancer.step()
            intervals.append(balancer.layer_times())
        return {name: min(own[name] for own in intervals) for name in "01"}

    for quickest in run_ranks(train, 2):
        assert quickest["0"] > 4 * quickest["1"] > 0.0
