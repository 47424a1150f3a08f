"""A parameter that layers of several stages have is one parameter there as in the undivided model."""

import itertools
import os
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import pipelines, sleeping_layers
from helpers.on_ranks import gathered, on_ranks
from helpers.pipelines import MAX_NORM, OPTIMIZERS, WIDTH, WORDS, assert_same, held, pipeline_of
from helpers.processes import told_by_survivors
from torch import nn

import zeroresize as zr
from zeroresize.pipeline import Pipeline, clip_grad_norm_, move_layers, moving_during_backward, repack
from zeroresize.pipeline import pipeline as pipeline_module
from zeroresize.resharding.agreement import sum_alike

pytestmark = pytest.mark.same_ranks

NUM_STEPS = 6
#: By the number of stages: the embedding, the layer that looks words up and the head are on as many stages as stand
#: before each, and the tied weight comes to stages without it and leaves others.
DIVISIONS = {
    2: [(2, (0, 3, 7)), (1, (0, 1, 7)), (2, (0, 2, 7)), (1, (0, 6, 7)), (2, (0, 4, 7))],
    3: [(3, (0, 2, 4, 7)), (1, (0, 1, 6, 7)), (2, (0, 2, 6, 7)), (2, (0, 4, 5, 7)), (2, (0, 1, 2, 7))],
}


class Twice(nn.Module):
    """Of the first layer of a stage, words come out as other words."""

    def forward(self, words):
        return (2 * words) % WORDS


class Attending(nn.Module):
    """Words that are like x, by the words of the embedding."""

    def __init__(self, weight):
        super().__init__()
        self.words = weight

    def forward(self, x):
        return x + torch.softmax(x @ self.words.t(), -1) @ self.words


class Sometimes(nn.Module):
    """A layer of which the tied weight has no part in some steps."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.gain, self.is_on = weight, nn.Parameter(torch.tensor(1.5)), True

    def forward(self, x):
        return torch.tanh(self.gain * (x @ self.weight if self.is_on else x))


def language_model():
    """The same layers at every call, in float64, with one weight of three of them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        embedding, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        blocks = pipelines.Block(), pipelines.Block()
    head.weight = embedding.weight
    layers = Twice(), embedding, blocks[0], Attending(embedding.weight), blocks[1], head, nn.LayerNorm(WORDS)
    return [layer.double() for layer in layers]


class Training(pipelines.Training):
    def __init__(self, group, boundaries=None, name="AdamW", **options):
        options = {"layers": language_model()} | options
        super().__init__(group, boundaries or DIVISIONS[group.size()][0][1], name, **options)

    @property
    def tie(self):
        (tie,) = self.pipeline.ties
        return tie

    def held(self):
        """All but gradients."""
        return {name: one for name, one in held(self.pipeline, self.optimizer).items() if "gradient" not in name}

    def require_copies_alike(self, group, num_holders):
        """Weight, gradient and optimizer state, on so many stages."""
        state, weight = self.optimizer.state.get(self.tie.parameter, {}), self.tie.parameter
        kept = {"weight": weight.detach(), "gradient": weight.grad, **state} if weight.numel() else {}
        copies = [each for each in gathered(group, kept) if each]
        assert len(copies) == num_holders
        for copy in copies:
            assert_same(copy, copies[0])


def require_as_undivided(by_rank, num_steps=NUM_STEPS, layers=None):
    """Weights and optimizer state, of training that has ended on these ranks."""
    _, wanted = pipelines.undivided(OPTIMIZERS["AdamW"], num_steps, MAX_NORM, layers or language_model())
    assert {name for tensors in by_rank for name in tensors} == wanted.keys()
    for name, tensor in ((name, tensor) for tensors in by_rank for name, tensor in tensors.items()):
        torch.testing.assert_close(torch.as_tensor(tensor), wanted[name], rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.few(2)
@pytest.mark.parametrize(("num_ranks", "schedule"), [(2, "1f1b"), (3, "1f1b"), (2, "gpipe"), (3, "gpipe")])
def test_it_trains_as_in_the_undivided_model_wherever_its_layers_are(run_ranks, num_ranks, schedule):
    """Two batches in a step of the optimizer, of four micro-batches each; layers move before, between and after."""

    def train(rank, group):
        training = Training(group, schedule=schedule)
        divisions = itertools.cycle(DIVISIONS[num_ranks])

        def move():
            num_holders, boundaries = next(divisions)
            move_layers(training.pipeline, boundaries, optimizer=training.optimizer)
            training.require_copies_alike(group, num_holders)

        for step in range(NUM_STEPS):
            training.train(1, between=move if step % 2 else lambda: None)
            training.require_copies_alike(group, len(training.tie.holders(stages_of(training.pipeline))))
            move()
        return training.held()

    require_as_undivided(run_ranks(train, num_ranks))


def stages_of(pipeline):
    return [stage for stage, (a, b) in enumerate(itertools.pairwise(pipeline.boundaries)) for _ in range(a, b)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_there_and_home_again_leaves_every_bit(run_ranks, num_ranks):
    def check(rank, group):
        training = Training(group)
        training.train(2)
        home = held(training.pipeline, training.optimizer)
        sent = []
        for num_holders, boundaries in (*DIVISIONS[num_ranks][1:], DIVISIONS[num_ranks][0]):
            report = move_layers(training.pipeline, boundaries, optimizer=training.optimizer, max_bytes=700)
            training.require_copies_alike(group, num_holders)
            has_it = training.pipeline.stage in training.tie.holders(stages_of(training.pipeline))
            assert (
                (training.tie.parameter.numel() > 0) == has_it == (training.tie.parameter in training.optimizer.state)
            )
            sent.append(report.sent_bytes)
        assert_same(held(training.pipeline, training.optimizer), home)
        return sent

    sent = run_ranks(check, num_ranks)
    if num_ranks == 2:  # where stages have the weight, it does not travel: with layers 2 to 5, or with layer 3 alone
        block = 8 * (4 * (2 * WIDTH + 2 * (2 * WIDTH * WIDTH) + 2 * WIDTH) + WIDTH) + 5 * 4
        assert [(of_move[2], of_move[4]) for of_move in sent] == [(0, 0), (2 * block + 8 * 4 * WORDS + 4, 0)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_it_moves_during_backward(run_ranks, num_ranks):
    def check(rank, group):
        during, between = (Training(group, count=torch.numel) for _ in range(2))  # else gradients are scaled later
        for step, (_, boundaries) in enumerate((*DIVISIONS[num_ranks][1:], DIVISIONS[num_ranks][0])):
            for training in (during, between):
                training.optimizer.zero_grad()
            options = {"optimizer": during.optimizer, "num_steps": 2, "max_bytes": 700}
            with moving_during_backward(during.pipeline, boundaries, **options) as move:
                pipelines.accumulate(during.pipeline, step)
            pipelines.accumulate(between.pipeline, step)
            move_layers(between.pipeline, boundaries, optimizer=between.optimizer)
            assert not move.was_repeated
            assert_same(held(during.pipeline, during.optimizer), held(between.pipeline, between.optimizer))
            for training in (during, between):
                clip_grad_norm_(training.pipeline, MAX_NORM)
                training.optimizer.step()

    run_ranks(check, num_ranks)


@on_ranks(3)
def test_its_gradient_counts_once_in_the_norm(rank, group):
    model, (words, target) = nn.Sequential(*language_model()), pipelines.batch(0)
    pipelines.loss_of(model(words), target).backward()
    wanted = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    assert wanted > MAX_NORM
    pipeline = pipeline_of(group, (0, 2, 4, 7), layers=language_model())
    pipeline.step(words, target=target)
    torch.testing.assert_close(clip_grad_norm_(pipeline, MAX_NORM), wanted, rtol=1e-12, atol=0.0)
    for parameter, other in zip(pipeline.parameters(), model.parameters(), strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-12)


def sometimes_tied(num_layers, **options):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64, **options))
    return [Sometimes(weight) for _ in range(num_layers)]


def mse_pipeline(group, layers, boundaries, **options):
    return Pipeline(
        layers, nn.functional.mse_loss, num_microbatches=2, process_group=group, boundaries=boundaries, **options
    )


@on_ranks(3)
def test_stages_without_a_part_get_the_gradient_of_the_others(rank, group):
    """And where no stage has one it is None, as in the undivided model, whose optimizer leaves the weight alone."""
    model, layers = nn.Sequential(*sometimes_tied(4)), sometimes_tied(4)
    pipeline = mse_pipeline(group, layers, (0, 1, 2, 4))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, pipeline)]
    x = torch.ones(4, 4, dtype=torch.float64)
    for taking_part in ((0, 1, 2, 3), (1,), (), (3,), (0, 2), ()):
        for number, layer in enumerate((*model, *layers)):
            layer.is_on = number % 4 in taking_part
        nn.functional.mse_loss(model(x), x).backward()
        pipeline.step(x, target=x)
        assert [layer.weight.grad is None for layer in (model[0], layers[0])] == [not taking_part] * 2
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(layers[0].weight, model[0].weight, rtol=1e-12, atol=1e-12)
        weights = gathered(group, layers[0].weight.detach())
        assert all(torch.equal(weight, weights[0]) for weight in weights)


def sum_and_count(outputs, target):
    return nn.functional.mse_loss(outputs, target, reduction="sum"), target.numel()


@pytest.mark.parametrize("loss", [nn.functional.mse_loss, sum_and_count])
@on_ranks(2)
def test_gradients_are_added_to_the_tensors_that_are_there(rank, group, *, loss):
    """As into a flat buffer, also where all are scaled in the end, since only the loss tells what counts."""
    layers, x = sometimes_tied(2), torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    pipeline = Pipeline(layers, loss, num_microbatches=2, process_group=group, boundaries=(0, 1, 2))
    pipeline.step(x, target=x)
    parameters = layers[rank].weight, layers[rank].gain
    wanted = [2.0 * parameter.grad for parameter in parameters]
    kept = [parameter.grad for parameter in parameters]
    pipeline.step(x, target=x)
    for parameter, gradient, total in zip(parameters, kept, wanted, strict=True):
        assert parameter.grad is gradient
        torch.testing.assert_close(gradient, total, rtol=1e-12, atol=0.0)


@on_ranks(3)
def test_copies_are_alike_however_ranks_fill_their_layers(rank, group):
    def fill(number, layer):
        torch.manual_seed(10 * rank + number)
        nn.init.normal_(layer.weight)
        nn.init.ones_(layer.gain)

    layers = sometimes_tied(4, device="meta")
    pipeline = mse_pipeline(group, layers, (0, 1, 2, 4), initialize=fill)
    assert len({id(layer.weight) for layer in layers}) == len(pipeline.ties) == 1 and not layers[0].weight.is_meta
    torch.manual_seed(0)
    first = nn.init.normal_(torch.empty(4, 4, dtype=torch.float64))
    assert torch.equal(layers[0].weight, first)
    layers = sometimes_tied(3, device="meta")
    mse_pipeline(dist.new_group([rank], use_local_synchronization=True), layers, (0, 3), initialize=fill)
    torch.manual_seed(10 * rank)
    assert torch.equal(layers[0].weight, nn.init.normal_(torch.empty_like(first)))  # as if it were divided
    layers = [layer.double() for layer in sometimes_tied(3)]
    layers[0].weight.data.fill_(rank)
    mse_pipeline(group, layers, (0, 1, 2, 3))
    assert (layers[0].weight == 0.0).all()


@on_ranks(2)
def test_nothing_more_travels_where_nothing_is_to_be_summed(rank, group, *, monkeypatch):
    messages, calls = [], []
    monkeypatch.setattr(pipeline_module, "sum_alike", lambda *given: messages.append(given) or sum_alike(*given))
    agree = pipeline_module.agreed
    monkeypatch.setattr(
        pipeline_module, "agreed", lambda *given, **names: calls.append(names) or agree(*given, **names)
    )
    x = torch.ones(4, 4, dtype=torch.float64)

    def num_of(tied, boundaries=(0, 1, 3), learns=True):
        layers = sometimes_tied(3)
        for number in range(tied, 3):
            layers[number].weight = nn.Parameter(layers[0].weight.detach().clone())
        layers[0].weight.requires_grad_(learns)
        pipeline = mse_pipeline(group, layers, boundaries)
        pipeline.step(x, target=x)
        messages.clear(), calls.clear()
        pipeline.step(x, target=x)
        return len(messages), len(calls)

    _, meetings = num_of(0)
    assert num_of(2, (0, 2, 3)) == (0, meetings)  # within a stage
    assert (num_of(3), num_of(3, learns=False)) == ((1, meetings + 1), (0, meetings + 1))


@on_ranks(3)
def test_what_cannot_be_summed_is_named_on_every_rank_and_earlier_gradients_are_kept(rank, group):
    sparse = nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4)
    sparse[0].weight = sparse[2].weight
    pipeline, words = mse_pipeline(group, sparse, (0, 1, 2, 3)), torch.arange(4)
    with pytest.raises((ValueError, RuntimeError), match=r"layers\.0\.weight: a gradient of layout torch\.sparse_coo"):
        pipeline.step(words, target=torch.ones(4, 4))
    layers, x = sometimes_tied(3), torch.ones(4, 4, dtype=torch.float64)
    pipeline = mse_pipeline(group, layers, (0, 1, 2, 3))
    pipeline.step(x, target=x)
    before = layers[0].weight.grad.clone()
    pipeline.step(x, target=x)
    assert torch.equal(layers[0].weight.grad, 2.0 * before)
    if rank == 1:  # as if units of it had moved
        layers[0].weight.grad, layers[0].weight.data = None, layers[0].weight.data[:, :2]
        layers[1].is_on = False
        layers[1].gain.register_hook(lambda _: setattr(layers[0].weight, "grad", torch.ones(4, 2).double()))
    with pytest.raises(RuntimeError, match=r"the gradients of layers\.0\.weight on the stages \[0, 1, 2\] are of"):
        pipeline.step(x, target=x)


def clip_each_stage(rank, pipeline, optimizer):
    nn.utils.clip_grad_norm_([each for each in pipeline.parameters() if each.numel()], 1e-3)
    optimizer.step()


def scale_each_stage(rank, pipeline, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    if rank == 1:
        pipeline.layers[1].gain.grad.fill_(torch.inf)
    scaler.step(optimizer)


def load_untied(rank, pipeline, optimizer):
    of_layers = [{"weight": torch.full((4, 4), number), "gain": torch.ones(())} for number in (0.0, 1.0)]
    pipeline.load_state_dict({f"layers.{rank}.{name}": one for name, one in of_layers[rank].items()})


def fill_each_stage(rank, pipeline, optimizer):
    torch.manual_seed(rank)
    nn.init.normal_(pipeline.layers[rank].weight)


def make_nan_of_one_bit(rank, pipeline, optimizer):
    pipeline.layers[rank].weight.data.fill_(torch.nan).view(torch.int64)[0, 0] += rank


@pytest.mark.parametrize(
    "part_copies", [clip_each_stage, scale_each_stage, load_untied, fill_each_stage, make_nan_of_one_bit]
)
@on_ranks(2)
def test_copies_that_came_apart_are_named_in_the_next_step(rank, group, *, part_copies):
    layers, x = sometimes_tied(2), torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    pipeline = mse_pipeline(group, layers, (0, 1, 2))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for value in (torch.nan, 0.1):  # NaNs are alike, too
        layers[rank].weight.data.fill_(value)
        pipeline.step(x, target=x)
    optimizer.zero_grad()
    pipeline.step(x, target=x)
    part_copies(rank, pipeline, optimizer)
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight .* on the stages \[0, 1\] have come apart.*GradScaler"):
        pipeline.step(x, target=x)


@on_ranks(2)
def test_what_would_step_before_gradients_are_summed_is_refused(rank, group):
    layers, x = sometimes_tied(3), torch.ones(4, 4, dtype=torch.float64)
    pipeline = mse_pipeline(group, layers, (0, 2, 3))
    before = layers[rank].weight.detach().clone()
    if rank == 1:
        optimizer = torch.optim.SGD([layers[0].weight], lr=0.1)
        handle = layers[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises((ValueError, RuntimeError), match=r"layers\.0\.weight .*post-accumulate hook"):
        pipeline.step(x, target=x)
    assert torch.equal(layers[0].weight, before) and layers[0].weight.grad is None
    if rank == 1:
        handle.remove()
    pipeline.step(x, target=x)


@pytest.mark.parametrize("is_tied_late", [True, False])
@on_ranks(2)
def test_layers_that_share_others_than_at_first_do_not_move(rank, group, *, is_tied_late):
    layers, apart = sometimes_tied(4), sometimes_tied(1)[0].weight
    if is_tied_late:
        layers[1].weight = apart
    pipeline = mse_pipeline(group, layers, (0, 2, 4))
    layers[1].weight = layers[0].weight if is_tied_late else apart
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    before = held(pipeline, optimizer)
    with pytest.raises(ValueError, match=r"layers\.0\.weight.*: other layers share it, or it is another, than when"):
        move_layers(pipeline, (0, 1, 4), optimizer=optimizer)
    assert_same(held(pipeline, optimizer), before)
    assert pipeline.boundaries == (0, 2, 4)


@pytest.mark.parametrize("were_tied", [True, False])
@on_ranks(2)
def test_one_parameter_that_was_put_on_layers_later_is_named_before_a_step(rank, group, *, were_tied):
    """Its gradients would not be summed over the stages, which would train copies of it apart."""
    layers, x = sometimes_tied(4), torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    for layer in layers[1:] if not were_tied else ():
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    pipeline = mse_pipeline(group, layers, (0, 2, 4))
    pipeline.step(x, target=x)
    (new,) = {layer.weight for layer in sometimes_tied(1)}
    for layer in layers:
        layer.weight = new
    named = r"layers\.0\.weight \(of layers \[0, 1, 2, 3\]\): other layers share it, or it is another, than when"
    with pytest.raises(ValueError, match=named):
        pipeline.step(x, target=x)
    assert new.grad is None


@on_ranks(2)
def test_a_parameter_that_was_replaced_is_named_before_a_move_and_a_save(rank, group):
    """Else the one that was there would be moved and saved, and what the other one learned lost."""
    layers, x = [nn.Linear(4, 4).double() for _ in range(4)], torch.ones(4, 4, dtype=torch.float64)
    pipeline = mse_pipeline(group, layers, (0, 2, 4))
    pipeline.step(x, target=x)
    layers[1].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    pipeline.step(x, target=x)
    for use in (
        lambda: move_layers(pipeline, (0, 1, 4), optimizer=optimizer),
        lambda: zr.sharded_state_dict(pipeline, optimizer),
    ):
        with pytest.raises(ValueError, match=r"layers\.1\.weight: another Parameter than when the pipeline was made"):
            use()


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return 0


@pytest.mark.parametrize(
    "part", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), WithExtraState(4, 4), nn.Linear(4, 4)]
)
@on_ranks(2)
def test_a_module_on_several_stages_has_parameters_alone(rank, group, *, part):
    shared, other = nn.Sequential(nn.Linear(4, 4), part), nn.Linear(4, 4)
    layers = [each.double() for each in (shared, other, shared)]
    if isinstance(part, nn.Linear) and not isinstance(part, WithExtraState):
        mse_pipeline(group, layers, (0, 2, 3))
        return
    named = r"layers\.0(\.1)? and layers\.2(\.1)? are one module, whose buffers or extra state"
    with pytest.raises(ValueError, match=named):
        mse_pipeline(group, layers, (0, 2, 3))
    pipeline = mse_pipeline(group, [*layers, other], (0, 3, 4))
    with pytest.raises(ValueError, match=named):
        move_layers(pipeline, (0, 2, 4), optimizer=None)


@pytest.mark.parametrize("killed", [0, 2])
def test_a_stage_that_dies_while_the_others_sum_is_named(tmp_path, killed):
    def check(rank, group):
        group = dist.new_group(list(range(4)), timeout=timedelta(seconds=3))
        layers, x = [*sometimes_tied(3), nn.Linear(4, 4, dtype=torch.float64)], torch.ones(4, 4, dtype=torch.float64)
        pipeline = mse_pipeline(group, layers, (0, 1, 2, 3, 4))
        pipeline.step(x, target=x)
        before = layers[0].weight.grad.clone() if rank < 3 else None
        if rank == killed:
            pipeline_module.sum_alike = lambda *_: os._exit(0)
        try:
            for _ in range(2):
                pipeline.step(x, target=x)
        except RuntimeError as error:
            assert rank == 3 or not torch.equal(layers[0].weight.grad, before)  # with what came of this step here
            return str(error)
        return "no error"

    texts = told_by_survivors(check, 4, tmp_path)
    assert sorted(texts) == [rank for rank in range(4) if rank != killed]
    for rank, text in texts.items():
        assert re.search(rf"ranks \[{killed}\] of the group|rank {killed}: ", text), (rank, text)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("before", "after"), [(3, 2), (3, 1), (1, 3)])
def test_a_checkpoint_of_one_division_is_read_in_another(run_ranks, tmp_path, before, after):
    def write(rank, group):
        group = dist.new_group(list(range(before)))
        if rank >= before:
            return []
        training = Training(group, {1: (0, 7)}.get(before))
        training.train(3)
        state = zr.sharded_state_dict(training.pipeline, training.optimizer)
        names = [name for section in ("layers", "optimizer") for name in state[section].state_dict()]
        dcp.save(state, checkpoint_id=tmp_path / "saved", process_group=group)
        return [name for name in names if re.fullmatch(r"layers\.[135]\.(weight|words)\.exp_avg", name)]

    def read(rank, group):
        group = dist.new_group(list(range(after)))
        if rank >= after:
            return {}
        training = Training(group, {1: (0, 7)}.get(after))
        training.pipeline.ties[0].parameter.data.zero_()
        state = zr.sharded_state_dict(training.pipeline, training.optimizer)
        dcp.load(state, storage_reader=zr.CheckpointReader(tmp_path / "saved"), process_group=group)
        if after > 1:
            training.require_copies_alike(group, after)
        training.step = 3
        training.decay.last_epoch = 3
        training.train(3)
        return training.held()

    names = run_ranks(write, 3)
    assert [name for of_rank in names for name in of_rank] == ["layers.1.weight.exp_avg"]  # once
    model = nn.ModuleDict({"layers": nn.ModuleList(language_model())})
    state = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    dcp.load(state, storage_reader=zr.CheckpointReader(tmp_path / "saved"), no_dist=True)
    model.load_state_dict(state)
    wanted = pipelines.undivided(OPTIMIZERS["AdamW"], 3, MAX_NORM, language_model())[1]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-10, atol=1e-10, msg=name)
    require_as_undivided(run_ranks(read, 3))


@pytest.mark.parametrize(("num_stages", "boundaries"), [(2, (0, 2, 4, 7)), (1, (0, 2, 4, 7)), (2, (0, 1, 2, 7))])
def test_a_pipeline_goes_on_with_fewer_stages(run_ranks, num_stages, boundaries):
    def train(rank, group):
        training = Training(group, boundaries)
        training.train(3)
        if repack(training.pipeline, training.optimizer, num_stages=num_stages).is_released:
            assert not training.tie.parameter.numel() and not training.optimizer.state
            return {}
        training.train(3)
        return training.held()

    require_as_undivided(run_ranks(train, 3))


@on_ranks(2)
def test_a_balancer_moves_layers_by_itself(rank, group):
    tied = (1, 4, 6)
    training = sleeping_layers.Training(group, 8, tied=tied)
    boundaries = []
    for speed in (1.0, 3.0, 1.0, 1 / 4):
        training.pace.of_rank = speed if rank == 1 else 1.0
        boundaries.append(training.train(14))
    *_, losses = gathered(group, training.losses)
    assert losses == pytest.approx(sleeping_layers.undivided_losses(8, 56, tied), rel=1e-10, abs=0.0)
    assert boundaries[0] == boundaries[2] == (0, 4, 8)
    assert boundaries[1][1] > 4 > boundaries[3][1]
