"""Layers move with all that belongs to them, bit for bit."""

import pytest
import torch
from helpers import pipelines
from helpers.faults import Evil
from helpers.on_ranks import gathered, on_ranks
from helpers.pipelines import BOUNDARIES, OPTIMIZERS, WIDTH, assert_same, groups_of, held, pipeline_of
from torch import nn

from zeroresize.pipeline import PipelineBalancer, move_layers, moving_during_backward

pytestmark = [pytest.mark.versions, pytest.mark.same_ranks]


def trained(group, name="AdamW", **options):
    pipeline = pipeline_of(group, **options)
    optimizer = OPTIMIZERS[name](groups_of(pipeline.named_parameters()))
    for step in range(2):
        pipelines.train_step(pipeline, optimizer, step)
    return pipeline, optimizer


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("max_bytes", [700, 2**26])
def test_there_and_home_again_leaves_every_bit_whatever_the_rounds(run_ranks, max_bytes, name):
    def check(rank, group):
        pipeline, optimizer = trained(group, name)
        before = held(pipeline, optimizer)
        assert any(one.endswith("gradient") for one in before)
        still = move_layers(pipeline, pipeline.boundaries, optimizer=optimizer)
        assert (still.num_layers, still.sent_bytes, still.num_rounds) == (0, 0, 0)
        reports, everything = [], []
        for boundaries in (*BOUNDARIES[3][1:], BOUNDARIES[3][0]):
            reports.append(move_layers(pipeline, boundaries, optimizer=optimizer, max_bytes=max_bytes))
            everything.append(held(pipeline, optimizer))
            assert pipeline.boundaries == boundaries
            assert reports[-1].buffer_bytes <= max_bytes
            assert (reports[-1].num_rounds > 2) == (max_bytes == 700)
        assert_same(everything[-1], before)
        return before, everything, reports

    by_rank = run_ranks(check, 3)
    whole = {name: one for before, *_ in by_rank for name, one in before.items()}
    for turn, boundaries in enumerate((*BOUNDARIES[3][1:], BOUNDARIES[3][0])):
        for rank, (_, everything, _) in enumerate(by_rank):
            present = {f"layers.{number}." for number in range(boundaries[rank], boundaries[rank + 1])}
            wanted = {name: one for name, one in whole.items() if name[:9] in present}
            assert_same(
                {name: everything[turn][name] for name in sorted(everything[turn])}, dict(sorted(wanted.items()))
            )
    first = [reports[0] for *_, reports in by_rank]
    # From (0, 2, 4, 7) to (0, 1, 6, 7): layers 1, 4 and 5 move.
    assert [report.num_layers for report in first] == [3] * 3
    block = 8 * (2 * WIDTH + 2 * (2 * WIDTH * WIDTH) + 2 * WIDTH + WIDTH)
    frozen, step = 8 * WIDTH, 4
    if name == "AdamW":  # weights, gradients, two moments, and steps of the five parameters that are trained
        layer = 4 * block - 3 * frozen + 5 * step
    else:
        layer = 3 * block - 2 * frozen
    assert [(one.sent_bytes, one.received_bytes) for one in first] == [(layer, 0), (0, 3 * layer), (2 * layer, 0)]


@on_ranks(2)
def test_the_optimizer_steps_what_came_and_forgets_what_went(rank, group):
    pipeline, optimizer = trained(group)
    groups = [[id(one) for one in group["params"]] for group in optimizer.param_groups]
    # These remember shapes for as long as something, such as the graph of a loss, holds on to them.
    learning = [one for one in pipeline.parameters() if one.requires_grad]
    accumulators = [one.expand_as(one).grad_fn.next_functions[0][0] for one in learning]
    move_layers(pipeline, (0, 6, 7), optimizer=optimizer)
    assert [[id(one) for one in group["params"]] for group in optimizer.param_groups] == groups
    learning = [one for name, one in pipeline.named_parameters() if one.numel() and one.requires_grad]
    assert set(map(id, optimizer.state)) == set(map(id, learning))
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}
    assert not any(one.grad is not None for one in pipeline.parameters() if not one.numel())
    before = [one.detach().clone() for one in learning]
    pipelines.train_step(pipeline, optimizer, 3)
    assert {state["step"].item() for state in optimizer.state.values()} == {3.0}
    assert not any(torch.equal(one, other) for one, other in zip(learning, before, strict=True))
    assert len(accumulators) >= len(learning)


@pytest.mark.parametrize("during", [False, True])
def test_extra_state_that_could_run_code_does_not_and_nothing_moves(run_ranks, tmp_path, during):
    class Remembering(nn.Linear):
        def get_extra_state(self):
            return Evil(tmp_path / "marker")

        def set_extra_state(self, state):
            raise AssertionError("it was read")

    def check(rank, group):
        layers = [nn.Linear(2, 2), Remembering(2, 2), nn.Linear(2, 2)]
        pipeline = pipeline_of(group, (0, 2, 3), layers=layers, loss=nn.functional.mse_loss)
        before = layers[1].weight.detach().clone()
        message = r"extra state of layers\.1: not read" if rank == 0 else r"ranks \[0\]"
        with pytest.raises((ValueError, RuntimeError), match=message):
            PipelineBalancer(pipeline, None)
        with pytest.raises((ValueError, RuntimeError), match=message):
            if during:
                with moving_during_backward(pipeline, (0, 1, 3), optimizer=None):
                    pipeline.step(torch.ones(4, 2), target=torch.ones(4, 2))
            else:
                move_layers(pipeline, (0, 1, 3), optimizer=None)
        assert pipeline.boundaries == (0, 2, 3) and torch.equal(layers[1].weight, before)

    run_ranks(check, 2)
    assert not (tmp_path / "marker").exists()


@on_ranks(2)
def test_what_changed_in_training_moves_too(rank, group):
    """Frozen parameters, the mode of modules, buffers that were None, dtypes, extra state, hooks and layouts."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
            self.every_other = nn.Parameter(torch.arange(12.0).view(3, 4)[:, ::2])
            self.end = nn.Parameter(torch.arange(6.0)[4:])
            self.register_buffer("late", None)
            self.register_buffer("early", torch.ones(3, dtype=torch.int64), persistent=False)
            self.inner, self.count = nn.Dropout(), 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    layers = [nn.Linear(1, 1), Counting(), Counting()]
    pipeline = pipeline_of(group, (0, 2, 3), layers=layers)
    moving, seen = layers[1], []
    moving.kernel.register_hook(seen.append)
    if rank == 0:
        moving.kernel.data.fill_(2.0)
        moving.every_other.requires_grad_(False)
        moving.late, moving.early, moving.count = torch.tensor([True]), None, 7
        moving.inner.eval()
        moving.kernel.data = moving.kernel.data.to(torch.bfloat16)
        moving.kernel.grad = torch.ones_like(moving.kernel)
    move_layers(pipeline, (0, 1, 3), optimizer=None)
    if rank == 0:
        assert moving.kernel.shape == (0, 3, 4, 5) and moving.late.numel() == 0 and moving.early is None
        assert moving.kernel.grad is None
        return
    assert moving.kernel.dtype == torch.bfloat16 and torch.equal(moving.kernel.grad, torch.ones_like(moving.kernel))
    assert moving.kernel.is_contiguous(memory_format=torch.channels_last) and (moving.kernel == 2.0).all()
    assert moving.every_other.tolist() == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
    assert not moving.every_other.requires_grad and moving.end.tolist() == [4.0, 5.0]
    assert moving.late.tolist() == [True] and moving.early is None and moving.count == 7
    assert moving.training and not moving.inner.training
    assert pipeline.layers[2].count == 0
    moving.kernel.sum().backward()
    assert seen[0].shape == moving.kernel.shape


@pytest.mark.parametrize("what", ["a module", "a tensor"])
@on_ranks(2)
def test_buffers_that_layers_share_stay_everywhere(rank, group, *, what):
    class Scaled(nn.Module):
        def __init__(self, table, scale):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.table = table if what == "a module" else nn.Module()
            self.table.register_buffer("scale", scale)

        def forward(self, x):
            return x * self.table.scale * self.weight

    table, scale = nn.Module(), torch.arange(4.0)
    pipeline = pipeline_of(group, (0, 1, 4), layers=[Scaled(table, scale) for _ in range(4)])
    for boundaries in ((0, 3, 4), (0, 2, 4)):
        report = move_layers(pipeline, boundaries, optimizer=None)
    assert all(layer.table.scale.tolist() == [0.0, 1.0, 2.0, 3.0] for layer in pipeline.layers)
    assert gathered(group, report.sent_bytes) == [16, 0]
