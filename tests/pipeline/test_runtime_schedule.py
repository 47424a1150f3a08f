"""Pipelines by the package's runtime: batches of any shape, few micro-batches, tensors without gradients."""

import pytest
import torch
from helpers.pipelines import pipeline_of
from torch import nn

from zeroresize.pipeline import Pipeline, move_layers

WIDTH = 6


class Embed(nn.Module):
    """[B, T] of int64 to [B, T, WIDTH], with a mask that travels along and has no gradient."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)

    def forward(self, tokens):
        return self.embedding(tokens), tokens > 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return x + torch.tanh(self.linear(x)) * mask[..., None], mask


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 11)

    def forward(self, x, mask):
        return self.linear(x * mask[..., None]).sum(dim=1)


def layers_of():
    torch.manual_seed(3)
    return nn.ModuleList([Embed(), Block(), Block(), Block(), Head()]).double()


def loss_of(outputs, target):
    return nn.functional.cross_entropy(outputs, target)


def sample(number, rows, length):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 11, (rows, length), generator=generator), torch.randint(0, 11, (rows,), generator=generator)


#: Rows and lengths of batches, one behind another: fewer rows than micro-batches, other lengths, known ones again.
SHAPES = [(6, 5), (1, 9), (7, 3), (2, 5), (6, 5)]


def undivided(batches):
    layers = layers_of()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    losses = []
    for parts in batches:
        total = sum(len(tokens) for tokens, _ in parts)
        loss = torch.zeros((), dtype=torch.float64)
        for tokens, target in parts:
            xs = (tokens,)
            for layer in layers:
                xs = layer(*xs)
                xs = xs if isinstance(xs, tuple) else (xs,)
            loss = loss + loss_of(xs[0], target) * len(tokens) / total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def pipeline(group, schedule="1f1b", num_microbatches=4):
    return Pipeline(layers_of(), loss_of, num_microbatches=num_microbatches, process_group=group, schedule=schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_batches_of_any_shape_train_as_the_undivided_model_while_layers_move(run_ranks, num_ranks, schedule):
    batches = [sample(number, *shape) for number, shape in enumerate(SHAPES)]

    def train(rank, group):
        model = pipeline(group, schedule)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step, (tokens, target) in enumerate(batches):
            loss = model.step(tokens, target=target)
            losses += [] if loss is None else [loss.item()]
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and num_ranks == 2:
                boundaries = (0, 4, 5) if model.boundaries != (0, 4, 5) else (0, 2, 5)
                move_layers(model, boundaries, optimizer=optimizer)
        outputs = model.evaluate(batches[0][0])
        return losses, None if outputs is None else outputs.shape

    *others, (losses, shape) = run_ranks(train, num_ranks)
    assert losses == pytest.approx(undivided([[each] for each in batches]), rel=1e-10)
    assert shape == (6, 11) and others == [([], None)] * (num_ranks - 1)


def test_micro_batches_of_one_step_may_differ_in_shape_and_number(run_ranks):
    steps = [[sample(number, rows, length) for rows, length in shapes] for number, shapes in enumerate((
        [(3, 5), (1, 9), (5, 2)], [(2, 4)], [(3, 5), (1, 9), (5, 2), (1, 1)],
    ))]  # fmt: skip

    def train(rank, group):
        model = pipeline(group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for parts in steps:
            loss = model.step_microbatches([(tokens,) for tokens, _ in parts], [target for _, target in parts])
            losses += [] if loss is None else [loss.item()]
            optimizer.step()
            optimizer.zero_grad()
        return losses

    assert run_ranks(train, 3)[-1] == pytest.approx(undivided(steps), rel=1e-10)


def test_where_layers_are_frozen_no_gradient_travels(run_ranks):
    def train(rank, group):
        model = pipeline(group)
        tokens, target = sample(0, 6, 5)
        model.step(tokens, target=target)
        for parameter in model.layers[:2].parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
        model.refresh()
        model.step(tokens, target=target)
        shapes = model._boundary_shapes
        assert [boundary[0].requires_grad for boundary in shapes] == [False] * 3 + [True] * 3
        return [parameter.grad is None for parameter in model.layers[:2].parameters()]

    assert all(map(all, run_ranks(train, 2)))


def test_what_cannot_be_run_is_refused_on_all_ranks(run_ranks):
    class Data(nn.Module):
        """Whose output's shape depends on what it is given."""

        def forward(self, tokens):
            return tokens[tokens > 0][None].double()

    def refuse(rank, group):
        model = pipeline(group)
        with pytest.raises(ValueError if rank == 0 else RuntimeError, match=r"no micro-batches|ranks \[0\]"):
            model.step_microbatches([], [])
        tokens, target = sample(0, 4, 3)
        with pytest.raises(ValueError, match="there are 1 targets for 2 micro-batches"):
            model.step_microbatches([(tokens,), (tokens,)], [target])
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
            model.step(tokens, target=target)
        assert model.step(tokens, target=target) is not None or rank == 0
        layers = [Data(), nn.Identity()]
        odd = Pipeline(layers, loss_of, num_microbatches=2, process_group=group, schedule="1f1b")
        with pytest.raises(ValueError, match=r"layers\.0 \(Data\) does not run on the meta device"):
            odd.step(*sample(0, 4, 3)[:1], target=torch.zeros(4, dtype=torch.int64))
        with pytest.raises(ValueError, match="schedule='zb'"):
            pipeline(group, "zb")
        with pytest.raises(ValueError, match="num_microbatches"):
            pipeline(group, num_microbatches=0)
        with pytest.raises(ValueError, match=r'takes equal micro-batches .* schedule="1f1b"'):
            pipeline_of(group).step_microbatches([], [])

    run_ranks(refuse, 2)
