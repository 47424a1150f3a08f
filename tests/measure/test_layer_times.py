"""How long each layer's products take on real ranks, under plans and loans and beside evaluation."""

import pytest
from helpers.virtual_training import FEATURES, Run

pytestmark = pytest.mark.same_ranks

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
