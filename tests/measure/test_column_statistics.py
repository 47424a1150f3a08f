"""What training tells of the columns: each statistic is its formula, also across a checkpoint."""

import copy

import numpy as np
import pytest
import torch
from helpers.processes import for_each, instances_of
from helpers.virtual_training import Run
from torch import nn

import zeroresize as zr
from zeroresize.config.keys import PRIORITIES
from zeroresize.measure.column_statistics import ActivationNorms, PathLength, WeightVariation, build_statistic
from zeroresize.plan.layer import LayerPlan

pytestmark = pytest.mark.same_ranks

COLUMNS = {"first": 6, "second": 8, "third": 5}
KINDS = [*({"priority": priority} for priority in PRIORITIES), {"priority": "variation", "paper": {"snapshot": "bf16"}}]


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mean_change(now_NK, then_NK):
    """δ_i = Σ_j |w_ji(now) − w_ji(then)| / N."""
    return (now_NK.detach().double() - then_NK.detach().double()).abs().mean(dim=0).numpy()


class Training:
    """Layers of one rank, the same at every call, with their optimizer and statistic."""

    def __init__(self, group, kind, frozen=(), **options):
        torch.manual_seed(0)
        self.layers = {
            name: zr.ColumnParallelLinear(number, 4, process_group=group, **options) for name, number in COLUMNS.items()
        }
        for name in frozen:
            self.layers[name].weight.requires_grad_(False)
        self.config = zr.BalanceConfig(mode="zero-pri", **kind)
        self.optimizer = torch.optim.AdamW([layer.weight for layer in self.layers.values()], lr=0.1)
        self.statistic = build_statistic(self.config, self.layers, self.optimizer)

    def train(self, steps):
        """δ of every step and layer, from copies of the weights."""
        changes = []
        for step in steps:
            then = {name: layer.weight.detach().clone() for name, layer in self.layers.items()}
            self.statistic.begin_step(step)
            for position, layer in enumerate(self.layers.values()):
                x = random(3, layer.num_columns, seed=10 * step + position)
                layer(x.to(layer.weight.dtype)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            changes.append({name: mean_change(layer.weight, then[name]) for name, layer in self.layers.items()})
        return changes


def test_variation_on_the_host_is_the_mean_change_since_the_last_take_and_first_since_training_begins(run_ranks):
    """Weights are multiples of 1/64, which makes every sum exact. A checkpoint may bring the first ones."""

    def check(rank, group):
        weights = [(64 * random(8, 5, seed=seed)).round() / 64 for seed in range(4)]
        layer = zr.ColumnParallelLinear(5, 8, process_group=group)
        statistic = WeightVariation({"layer": layer}, storage="host")
        assert statistic.bytes_held == 4 * 8 * 5
        layer.load_state_dict({**layer.state_dict(), "weight": weights[1]})
        layer(random(3, 5, seed=3))
        for then, now in ((weights[1], weights[2]), (weights[2], weights[3])):
            layer.weight.data.copy_(now)
            layer(random(3, 5, seed=4))
            assert statistic.take()["layer"].tolist() == mean_change(now, then).tolist()
        assert statistic.take()["layer"].tolist() == [0.0] * 5

    run_ranks(check, 1)


def test_activation_norms_are_of_the_training_forwards_of_sampled_steps(run_ranks):
    """An epoch's first step and every tenth after it, with two forwards each; evaluation is no training. A row-parallel
    layer sees its own slice."""

    @for_each([(False,), (True,)])
    def check(rank, group, is_pruned):
        torch.manual_seed(0)
        layers = {
            "column": zr.ColumnParallelLinear(6, 8, process_group=group),
            "row": zr.RowParallelLinear(8, 6, process_group=group),
            "row of whole input": zr.RowParallelLinear(12, 4, process_group=group, input_is_parallel=False),
        }
        for layer in layers.values() if is_pruned else ():
            layer.plan = LayerPlan.from_pruned(torch.tensor([0, 2]), layer.num_columns)
        statistic = ActivationNorms(layers)
        statistic.take()
        seen = {name: [] for name in layers}
        for step in range(3, 24):
            statistic.begin_step(step)
            for half in range(2):
                inputs = {
                    "column": random(3, 2, 6, seed=20 * step + half),
                    "row": random(3, 2, 4, seed=20 * step + half + 2 * (1 + rank)),
                    "row of whole input": random(5, 12, seed=20 * step + half + 10),
                }
                for name, layer in layers.items():
                    x = inputs[name]
                    layer.eval()(100.0 * x)
                    layer.train()(x)
                    x_of_rank = x.chunk(2, dim=-1)[rank] if name == "row of whole input" else x
                    if step in (3, 13, 23):
                        seen[name].append(x_of_rank.reshape(-1, layer.num_columns).double())
        taken = statistic.take()
        for name, layer in layers.items():
            rms_K = torch.cat(seen[name]).square().mean(dim=0).sqrt()
            norms_K = layer.weight.detach().double().square().sum(dim=0).sqrt()
            assert taken[name] == pytest.approx((rms_K * norms_K).numpy(), rel=1e-5)
        assert all(np.isnan(values).all() for values in statistic.take().values()), "a new epoch"

    run_ranks(check, 2)


def test_a_forward_that_overflows_tells_nothing(run_ranks):
    """As under a loss scale that is still too high: the step is skipped, and the epoch's statistic must survive."""

    def check(rank, group):
        layer = zr.ColumnParallelLinear(6, 8, process_group=group)
        statistics = [ActivationNorms({"layer": layer}) for _ in range(2)]
        x, overflown = random(4, 6, seed=0), random(4, 6, seed=1)
        overflown[2, 3] = torch.inf
        for statistic, inputs in zip(statistics, ([x], [overflown, x]), strict=True):
            statistic.begin_step(0)
            for batch in inputs:
                layer(batch)
        expected, taken = (statistic.take()["layer"].tolist() for statistic in statistics)
        assert taken == expected and np.isfinite(taken).all()
        statistics[1].begin_step(1)
        layer(overflown)
        assert np.isnan(statistics[1].take()["layer"]).all(), "nothing else was seen"

    run_ranks(check, 1)


def test_path_length_looks_at_the_layers_by_turns_and_each_stands_for_all_steps(run_ranks):
    def check(rank, group):
        training = Training(group, {"priority": "path_length"})
        began = training.layers["first"].weight.detach().clone()
        changes = training.train(range(7))
        taken = training.statistic.take()
        for turn, name in enumerate(COLUMNS):
            changes_of_turn = [changes[step][name] for step in range(turn, 7, 3)]
            assert taken[name] == pytest.approx(7 / len(changes_of_turn) * sum(changes_of_turn), rel=1e-4)
        assert (taken["first"] > 1.01 * mean_change(training.layers["first"].weight, began)).any(), (
            "a path, no distance"
        )

        change = training.train([7])[0]["second"]  # whose turn it is
        taken = training.statistic.take()
        assert taken["second"] == pytest.approx(change, rel=1e-4)
        assert np.isnan(taken["first"]).all() and np.isnan(taken["third"]).all(), "an epoch too short to see them"

    run_ranks(check, 1)


def test_path_length_does_not_count_steps_that_freezing_takes_back(run_ranks):
    """Column by column: what the optimizer moved and freezing put back was never travelled."""

    def check(rank, group):
        with instances_of(PathLength) as statistics:
            run = Run(group, mode="zero-pri", priority="path_length", ratio=0.5, ranks="all", pruned_update="freeze")
        run.steps(4)
        pruned = run.pruned()
        for name, values in statistics[0].take().items():
            kept = np.setdiff1d(np.arange(len(values)), pruned[name])
            assert values[pruned[name]].tolist() == [0.0] * len(pruned[name])
            assert (values[kept] > 0).all()

    run_ranks(check, 2)


def test_whatever_the_statistic_it_goes_on_from_a_state_and_takes_any_precision_and_frozen_weights(run_ranks):
    @for_each([(kind,) for kind in KINDS])
    def check(rank, group, kind):
        def parts(training):
            return nn.ModuleDict(training.layers), training.optimizer, training.statistic

        uninterrupted, resumed = Training(group, kind), Training(group, kind)
        uninterrupted.train(range(6))
        uninterrupted.statistic.take()
        uninterrupted.train(range(6, 8))  # two of three layers have had their turn
        saved = copy.deepcopy([part.state_dict() for part in parts(uninterrupted)])
        uninterrupted.train(range(8, 12))
        for part, state in zip(parts(resumed), saved, strict=True):
            part.load_state_dict(state)
        resumed.train(range(8, 12))
        first, second = uninterrupted.statistic.take(), resumed.statistic.take()
        for name in COLUMNS:
            assert np.isfinite(first[name]).all() and (first[name] > 0).any()
            assert first[name].tolist() == second[name].tolist()

        for dtype in (torch.float64, torch.bfloat16):
            training = Training(group, kind, dtype=dtype)
            training.train(range(3))
            assert all(np.isfinite(values).all() for values in training.statistic.take().values())
        # A weight does not move because nobody trains it, which says nothing of its importance.
        training = Training(group, kind, frozen=["second"] if kind["priority"] != "activation" else [])
        training.train(range(4))
        unknown = [name for name, values in training.statistic.take().items() if np.isnan(values).all()]
        assert unknown == (["second"] if kind["priority"] != "activation" else [])

    run_ranks(check, 1)
