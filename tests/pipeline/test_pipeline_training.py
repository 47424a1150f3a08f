"""A pipeline whose layers move trains as the undivided model does."""

import re

import pytest
import torch
from helpers import pipelines
from helpers.on_ranks import gathered, on_ranks
from helpers.pipelines import BOUNDARIES, MICRO, OPTIMIZERS, batch, groups_of, held, layers_of, pipeline_of, train_step
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from zeroresize.pipeline import Pipeline, move_layers
from zeroresize.pipeline.stage_layers import divided_by_parameters

pytestmark = pytest.mark.same_ranks

NUM_STEPS, MAX_NORM = 6, 0.05


def train_with_moves(rank, group, make, schedule):
    """Two moves between steps, one between two batches of a step, and home again."""
    pipeline = pipeline_of(group, loss=pipelines.half_the_loss, schedule=schedule)
    optimizer = make(groups_of(pipeline.named_parameters()))
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    home, *others = BOUNDARIES[group.size()]
    parameters = list(pipeline.parameters())

    def move(boundaries):
        return move_layers(pipeline, boundaries, optimizer=optimizer)

    losses, reports = [], []
    for step in range(NUM_STEPS):
        between = (lambda: reports.append(move(home))) if step == 4 else lambda: None
        losses += train_step(pipeline, optimizer, step, MAX_NORM, between)
        decay.step()
        if step in (0, 2) and others:
            reports.append(move(others[step // 2]))
    assert all(one is other for one, other in zip(pipeline.parameters(), parameters, strict=True))
    assert pipeline.boundaries == home
    assert group.size() == 1 or all(report.num_layers for report in reports)
    tensors = held(pipeline, optimizer)
    return losses, {name: torch.as_tensor(one) for name, one in tensors.items() if not name.endswith("gradient")}


def check_against_undivided(run_ranks, num_ranks, name, schedule):
    by_rank = run_ranks(train_with_moves, num_ranks, OPTIMIZERS[name], schedule)
    losses, wanted = pipelines.undivided(OPTIMIZERS[name], NUM_STEPS, MAX_NORM)
    assert [own for own, _ in by_rank[:-1]] == [[]] * (num_ranks - 1)
    torch.testing.assert_close(by_rank[-1][0], losses, rtol=1e-10, atol=1e-10)
    tensors = {name: one for _, own in by_rank for name, one in own.items()}
    assert sum(len(own) for _, own in by_rank) == len(tensors) and tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_two_stages_train_as_the_undivided_model(run_ranks, name, schedule):
    check_against_undivided(run_ranks, 2, name, schedule)


@pytest.mark.parametrize(
    ("num_ranks", "name", "schedule"),
    [
        (3, "AdamW, foreach, amsgrad", "1f1b"),
        pytest.param(1, "SGD", "gpipe", marks=pytest.mark.slow),
        pytest.param(2, "AdamW, fused", "1f1b", marks=pytest.mark.slow),
        pytest.param(3, "Adafactor", "gpipe", marks=pytest.mark.slow),
        pytest.param(4, "AdamW", "1f1b", marks=pytest.mark.slow),
        pytest.param(4, "SGD", "gpipe", marks=pytest.mark.slow),
    ],
)
def test_other_numbers_of_stages_and_optimizers_do_too(run_ranks, num_ranks, name, schedule):
    check_against_undivided(run_ranks, num_ranks, name, schedule)


def test_evaluation_between_training_steps_and_layers_built_on_the_meta_device(run_ranks):
    def check(rank, group):
        with torch.device("meta"):
            layers = [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)]
        seen = []

        def initialize(number, layer):
            seen.append(number)
            torch.manual_seed(number)
            layer.reset_parameters()

        pipeline = Pipeline(
            layers, nn.functional.mse_loss, num_microbatches=2, process_group=group, initialize=initialize
        )
        assert seen == ([0, 2] if rank == 0 else [3, 4])
        assert [one.numel() for one in pipeline.parameters()] == (
            [12, 4, 16, 4, 0, 0, 0, 0] if rank == 0 else [0, 0, 0, 0, 4, 4, 8, 2]
        )
        assert not any(one.is_meta for one in pipeline.parameters())
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        x, y = torch.arange(12.0).view(4, 3).sin(), torch.arange(8.0).view(4, 2).cos()
        results = []
        for turn in range(3):
            pipeline.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
            pipeline.layers.eval()
            results.append(pipeline.evaluate(x))
            pipeline.layers.train()
            move_layers(pipeline, [(0, 4, 5), (0, 1, 5), (0, 3, 5)][turn], optimizer=optimizer)
        whole = pipeline.state_dict()
        return results, whole, (x, y)

    (nothing, first, data), (results, second, _) = run_ranks(check, 2)
    assert nothing == [None] * 3
    layers = [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)]
    for number in (0, 2, 3, 4):
        torch.manual_seed(number)
        layers[number].reset_parameters()
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(3):
        for x, y in zip(data[0].chunk(2), data[1].chunk(2), strict=True):
            (nn.functional.mse_loss(model.train()(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(results[turn], model.eval()(data[0]).detach())
    whole = {f"layers.{name}": value for name, value in model.state_dict().items()}
    torch.testing.assert_close({**first, **second}, whole)


@on_ranks(2)
def test_a_checkpoint_of_the_whole_model_is_loaded_stage_by_stage(rank, group):
    pipeline = pipeline_of(group, (0, 5, 7))
    whole = nn.ModuleDict({"layers": nn.ModuleList(layers_of(seed=5))}).state_dict()
    pipeline.load_state_dict(whole)
    state = pipeline.state_dict()
    assert all(torch.equal(one, whole[name]) for name, one in state.items())
    with pytest.raises(RuntimeError, match="Missing key"):
        pipeline.load_state_dict({})
    (first, whole), (second, _) = gathered(group, (set(state), set(whole)))
    assert first | second == whole and not first & second


REFUSED = [
    ({"boundaries": (0, 3, 6)}, r"do not divide 7 layers over 2 stages: they must be 3 rising"),
    ({"layers": [nn.Linear(2, 2)]}, "1 layers cannot be divided over 2 stages"),
    ({"schedule": ScheduleInterleaved1F1B}, "schedule=ScheduleInterleaved1F1B is not allowed"),
    ({"schedule": Schedule1F1B}, "schedule=Schedule1F1B is not allowed: .gpipe. or .1f1b. is needed"),
    ({"schedule": "zb"}, "schedule='zb' is not allowed"),
    ({"num_microbatches": 0}, "num_microbatches=0"),
]


@on_ranks(2, REFUSED)
def test_what_does_not_fit_is_an_error_before_anything_is_changed(rank, group, options, expected):
    layers = options.get("layers") or layers_of()
    numbers = {"num_microbatches": MICRO, "boundaries": None, **options, "layers": layers}
    sizes = [one.numel() for layer in layers for one in layer.parameters()]
    with pytest.raises(ValueError, match=expected):
        Pipeline(loss=pipelines.loss_of, process_group=group, **numbers)
    assert [one.numel() for layer in layers for one in layer.parameters()] == sizes


@on_ranks(2)
def test_ranks_that_are_given_other_boundaries_tell_each_other(rank, group):
    with pytest.raises(RuntimeError, match=r"differ in layers, boundaries, .*: \[\[0\], \[1"):
        pipeline_of(group, (0, 3 + rank, 7))
    with pytest.raises((ValueError, RuntimeError)) as caught:
        pipeline_of(group, (0, 3, 7 + rank))
    layers = layers_of()
    with pytest.raises((ValueError, RuntimeError)) as missing:
        pipeline_of(group, layers=layers if rank == 0 else [layer.to("meta") for layer in layers])
    first, second = gathered(group, (str(caught.value), str(missing.value)))
    assert all("ranks [1] of the group failed" in text for text in first)
    assert "do not divide" in second[0] and "layers [3, 4, 5, 6] are on the meta device: pass init" in second[1]


@on_ranks(3)
def test_a_layer_that_fails_in_the_first_forward_is_told_to_all(rank, group):
    class Failing(nn.Module):
        fails = True

        def forward(self, x):
            if self.fails:
                raise ArithmeticError("no such number")
            return x

    failing = Failing()
    pipeline = pipeline_of(group, (0, 2, 4, 5), layers=[*layers_of()[:3], failing, layers_of()[-1]])
    words, target = batch(0)
    with pytest.raises(RuntimeError) as caught:
        pipeline.step(words, target=target)
    failing.fails = False
    assert pipeline.step(words, target=target) is None or rank == 2
    first, *others = gathered(group, str(caught.value))
    assert others == [first] * 2
    assert re.search(
        r"first forward fails on stage 1: layers\.3 \(Failing\), called with \(torch\.\S+ \[.*\]\), raises Arith", first
    )
    assert "ArithmeticError: no such number" in first


def sized(*sizes):
    return [nn.Linear(size, 1, bias=False, device="meta") if size else nn.Identity() for size in sizes]


def test_layers_are_divided_by_parameters_unless_that_parts_those_that_refer_to_others():
    for sizes, boundaries in (
        ((40, 10, 10, 10, 10, 10, 30), (0, 1, 5, 7)),
        ((4,) * 8, (0, 3, 6, 8)),  # equally many, where nothing is better
        ((0, 0, 0, 0), (0, 2, 4)),
        ((9, 1, 1, 1, 1), (0, 1, 5)),
        ((40, 40, 10, 10), (0, 1, 4)),
    ):
        layers = sized(*sizes)
        assert divided_by_parameters(layers, len(boundaries) - 1).boundaries == boundaries
    layers[1].weight = layers[0].weight
    assert divided_by_parameters(layers, 2).boundaries == (0, 1, 4)
    layers = sized(40, 40, 10, 10)
    layers[1].referred = [layers[0].weight]
    assert divided_by_parameters(layers, 2).boundaries == (0, 2, 4)


@on_ranks(2)
def test_a_pipeline_begins_with_it_unless_somebody_says_so(rank, group):
    begun = []
    for boundaries in (None, (0, 2, 4)):
        layers, loss = [nn.Linear(*sizes) for sizes in ((8, 8), (8, 2), (2, 2), (2, 2))], nn.functional.mse_loss
        pipeline = Pipeline(layers, loss, num_microbatches=2, process_group=group, boundaries=boundaries)
        begun.append(pipeline.boundaries)
    assert begun == [(0, 1, 4), (0, 2, 4)]
