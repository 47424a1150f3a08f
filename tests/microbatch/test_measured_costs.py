"""Costs of layers are measured, kept, and read back."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.micro_batches import MAKE, SIZES, layers_of, planner_of, table_of
from helpers.on_ranks import gathered, on_ranks
from helpers.processes import caught_log_lines
from helpers.states import resumed
from torch import nn

from lm_examples.layers import summed_loss
from zeroresize.measure.memory_meter import LiveBytes
from zeroresize.microbatch import measuring
from zeroresize.microbatch.measuring import ProfiledShapes, kinds_of, measure_model
from zeroresize.microbatch.padded import PaddedBatch
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.microbatches.costs import CostTable, LayerGrid, grid_points, powers_of_two
from zeroresize.policy.microbatches.plan import MicroBatch, shapes_of
from zeroresize.runtime.instructions import instructions_of
from zeroresize.runtime.stage import Stage
from zeroresize.strategy.model import SwitchableModel
from zeroresize.utils.codec import decoded, encoded


def grid_of(function, axes=(0,), sizes=(1, 2, 8), lengths=((4, 8, 32),)):
    rows, seen = grid_points(sizes, lengths)
    shape = (len(sizes), *map(len, lengths))
    return LayerGrid(
        axes, sizes, lengths, *(factor * function(rows, seen).reshape(shape) for factor in (1.0, 2.0, 3, 4))
    )


def test_a_grid_is_exact_at_its_points_and_for_multilinear_functions_everywhere():
    random = np.random.default_rng(0)
    sizes, lengths = random.integers(1, 40, 200), random.integers(1, 33, (200, 2))
    grid = grid_of(lambda rows, seen: 5.0 + rows * (2.0 + seen[:, 0]))
    values = grid.values(sizes, lengths)
    assert values[0] == pytest.approx(5.0 + sizes * (2.0 + lengths[:, 0]))
    assert values[1:] == pytest.approx(values[0] * np.array([[2.0], [3.0], [4.0]]))
    pair = grid_of(lambda rows, seen: rows * (1.0 + seen[:, 0] * seen[:, 1]), (0, 1), lengths=((4, 32), (2, 9, 32)))
    assert pair.values(sizes, lengths)[0] == pytest.approx(sizes * (1.0 + lengths[:, 0] * lengths[:, 1]))
    square = grid_of(lambda rows, seen: rows * seen[:, 0] ** 2.0)
    rows, seen = grid_points(square.sizes, square.lengths)
    assert square.values(rows, seen)[0] == pytest.approx(rows * seen[:, 0] ** 2)


def test_what_memory_did_not_hold_is_infinite_between_and_beyond():
    grid = grid_of(lambda rows, seen: np.where(rows * seen[:, 0] > 64, math.inf, 1.0 * rows * seen[:, 0]))
    values = grid.values(np.array([2, 2, 3, 8]), np.array([[32], [20], [20], [5]]))[0]
    assert (
        values[:2] == pytest.approx([64.0, 40.0]) and np.isinf(values[2:3]).all() and values[3] == pytest.approx(40.0)
    )
    assert encoded(resumed(grid)) == encoded(grid)
    with pytest.raises(ValueError, match="33 tokens are longer than what was measured: at most 32"):
        grid.values(np.array([1]), np.array([[33]]))


def test_a_sample_longer_than_what_was_measured_is_named_with_what_to_do():
    planner = planner_of("t5", Strategy(pp=2))
    lengths = np.array([(3, 5), (64, 2), (7, 65), (90, 90)])
    with pytest.raises(ValueError) as caught:
        replace(planner, lengths_of=lambda iteration: lengths)(4)
    assert str(caught.value) == (
        "iteration 4: sample 2 of [7, 65] tokens is longer than what was measured, at most 64: measure costs up to the "
        "longest sample (longest= of ProfiledShapes), or cut or drop such samples"
    )


def test_grids_that_are_none_are_named():
    for change, message in (
        ({"sizes": [1, 1, 8]}, "sizes"),
        ({"lengths": [[8, 4, 32]]}, "lengths"),
        ({"forward_s": [1.0]}, "forward_s"),
        ({"forward_s": [[-1.0] * 3] * 3}, "not negative"),
        ({"axes": []}, "axes"),
    ):
        with pytest.raises(ValueError, match=message):
            decoded(LayerGrid, encoded(grid_of(lambda rows, seen: 1.0 * rows)) | change, "grid")
    assert powers_of_two(5) == (1, 2, 4, 8) and powers_of_two(1) == (1, 2) and powers_of_two(64, 32) == (32, 64)


def measured(run_ranks, layers, batch_of, shapes, **options):
    """Costs of an undivided model on one rank."""

    def measure(rank, group):
        model = SwitchableModel(layers, strategies=[Strategy()], process_group=group)
        return measure_model(model, batch_of, shapes, **options)

    return run_ranks(measure, 1)[0]


def sum_of(x, batch):
    return x.sum()


class Passing(nn.Module):
    """Lets a known time pass in forward, by a clock of its own."""

    now_s = 0.0

    def __init__(self, token_s):
        super().__init__()
        self.token_s, self.weight = token_s, nn.Parameter(torch.ones(4))

    def forward(self, x, batch):
        rows, length = batch.tokens.shape
        Passing.now_s += self.token_s * rows * length
        x = x.new_zeros(rows, length, 4, dtype=torch.float32) if not x.is_floating_point() else x
        return x * self.weight


def test_layers_that_take_a_known_time_are_found_to_take_it(run_ranks, monkeypatch):
    monkeypatch.setattr(measuring, "seconds_when_done", lambda device: Passing.now_s)
    layers = nn.ModuleList([Passing(0.0), Passing(2e-4), Passing(2e-4), Passing(0.0)])
    shapes = ProfiledShapes(("size", "length"), 4, (16,), shortest=4)
    table = measured(run_ranks, layers, PaddedBatch.hollow, shapes, loss=sum_of, recomputations=["none"])
    assert table.kinds[1] == table.kinds[2] and len(set(table.kinds)) == 3
    values = table.grids["none"][table.kinds[1]].values(np.array([2, 3]), np.array([[10], [16]]))
    assert values[0] == pytest.approx([2e-4 * 20, 2e-4 * 48])
    (costs,) = table.costs((0, 2, 4)).values()
    prices = costs.prices(np.array([2]), np.array([[10]]))
    assert prices.forward_s[0] == pytest.approx([2e-4 * 20] * 2)


def test_nothing_is_run_that_is_longer_than_the_longest(run_ranks):
    """As of a table of positions, which ends with it."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(24, 4)

        def forward(self, x, batch):
            length = batch.sizes["length"]
            return x.new_zeros(len(x), length, 4, dtype=torch.float32) + self.table(torch.arange(length))

    shapes = ProfiledShapes(("size", "length"), 2, (24,), shortest=8)
    layers = nn.ModuleList([Positions(), Passing(0.0)])
    table = measured(run_ranks, layers, PaddedBatch.hollow, shapes, loss=sum_of, recomputations=["none"])
    assert table.longest == (24,)
    assert all(grid.lengths == ((8, 16, 24),) for grid in table.grids["none"].values())


def test_kept_bytes_are_those_that_a_hand_counts(run_ranks):
    """Linear, GELU, Linear: inputs of both products and of the GELU, in float32; and gradients meanwhile."""

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

        def forward(self, x, batch):
            return self.down(nn.functional.gelu(self.up(x)))

    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(5, 8)

        def forward(self, x, batch):
            return self.tokens(x)

    layers = nn.ModuleList([Embedding(), Mlp(), Mlp()])
    shapes = ProfiledShapes(("size", "length"), 2, (16,), shortest=8)
    table = measured(run_ranks, layers, PaddedBatch.hollow, shapes, loss=sum_of)
    tokens = 2 * 16
    for way, kept in (("none", 8 + 32 + 32), ("layers", 8)):
        values = table.grids[way][table.kinds[1]].values(np.array([2]), np.array([[16]]))
        assert values[2] == pytest.approx(4 * kept * tokens)
        assert 4 * 32 * tokens <= values[3] <= 4 * (3 * 32 + 3 * 8) * tokens + 3 * 4 * 256 + 4 * (8 + 64) * tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "t5"])
@pytest.mark.parametrize("recompute", ["none", "layers"])
def test_peak_memory_of_a_step_is_predicted(run_ranks, kind, recompute):
    """Counted operation by operation, in three micro-batches of other sizes, all forwards first."""
    layers = layers_of(kind, torch.float32)
    shapes = ProfiledShapes(SIZES[kind], 4, (32,) * (len(SIZES[kind]) - 1), shortest=8)
    hollow = MAKE[kind][1].hollow
    table = measured(run_ranks, layers, hollow, shapes, loss=summed_loss, recomputations=[recompute])
    costs = table.costs((0, len(layers)))[recompute]
    microbatches = [
        MicroBatch(((0,),) * size, (length,) * (len(SIZES[kind]) - 1)) for size, length in ((4, 16), (2, 32), (1, 8))
    ]
    prices = costs.prices(*shapes_of(microbatches))
    stage = Stage(list(layers), 0, [], None, torch.device("cpu"), recompute=recompute)
    batches = [hollow(dict(zip(SIZES[kind], [each.size, *each.lengths], strict=True))) for each in microbatches]
    stage.train(instructions_of("gpipe", 1, 3)[0], batches, summed_loss)
    with LiveBytes() as live:
        stage.train(instructions_of("gpipe", 1, 3)[0], batches, summed_loss)
    kept, workspace = prices.activation_bytes[:, 0], prices.workspace_bytes[:, 0]
    expected = max(kept.sum() + workspace[0], kept[:2].sum() + workspace[1], kept.sum() + workspace[2])
    assert live.most() == pytest.approx(expected, rel=0.08)


@on_ranks(4)
def test_stages_bring_their_numbers_together(rank, group):
    model = SwitchableModel(layers_of("gpt"), strategies=[Strategy(tp=2, pp=2)], process_group=group)
    shapes = ProfiledShapes(SIZES["gpt"], 2, (8,), shortest=4)
    with caught_log_lines() as lines:
        table = measure_model(model, PaddedBatch.hollow, shapes, loss=summed_loss)
    assert table.kinds == kinds_of(layers_of("gpt")) and not any(one.grad is not None for one in model.parameters())
    fingerprints, lines = zip(
        *gathered(group, (table.fingerprint, [line for line in lines if "costs" in line])), strict=True
    )
    assert len(set(fingerprints)) == 1 and not any(lines[1:])
    before, after = lines[0]
    assert before.startswith("measuring costs of 3 kinds of layers and 2 ways of recomputation")
    assert after.startswith("measured costs in ")


def test_tables_are_kept_and_those_of_other_models_refused(tmp_path):
    table = table_of("gpt")
    table.save(tmp_path / "costs.json")
    read = CostTable.load(tmp_path / "costs.json")
    assert read.fingerprint == table.fingerprint
    table.require_model(table.kinds, table.names)
    for kinds, names, message in (
        (table.kinds[1:], table.names, "of a model of 4 layers: this one has 3"),
        (("other", *table.kinds[1:]), table.names, "another model: layer 0 was layer, and is other"),
        (table.kinds, ("size", "source", "target"), "micro-batches with"),
    ):
        with pytest.raises(ValueError, match=message):
            table.require_model(kinds, names)
    (tmp_path / "costs.json").write_text("{}")
    with pytest.raises(ValueError, match=r"costs\.json: costs\.kinds: missing"):
        CostTable.load(tmp_path / "costs.json")
    with pytest.raises(ValueError, match="longest"):
        ProfiledShapes(("size", "length"), 1, (0,))
    with pytest.raises(ValueError, match="a name is needed"):
        ProfiledShapes(("size",), 1, (8,))
