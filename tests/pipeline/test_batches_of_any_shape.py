"""Batches of any shape and dtype, few micro-batches, layers that read values, tensors without gradients."""

import pytest
import torch
from helpers.on_ranks import gathered, on_ranks
from torch import nn

from zeroresize.pipeline import Pipeline, move_layers

pytestmark = pytest.mark.same_ranks

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


class Narrow(nn.Module):
    """Under autocast it returns what the linear layer does, without a sum that would be wide again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return self.linear(x), mask


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


def chained(layers, tokens):
    xs = (tokens,)
    for layer in layers:
        xs = layer(*xs)
        xs = xs if isinstance(xs, tuple) else (xs,)
    return xs[0]


def undivided(batches):
    layers = layers_of()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    losses = []
    for parts in batches:
        total = sum(len(tokens) for tokens, _ in parts)
        loss = torch.zeros((), dtype=torch.float64)
        for tokens, target in parts:
            loss = loss + loss_of(chained(layers, tokens), target) * len(tokens) / total
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


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_under_autocast_stages_compute_bit_for_bit_what_the_undivided_model_does(run_ranks, schedule):
    """Of three stages, whose second hands bfloat16 on."""
    tokens, target = sample(0, 7, 5)

    def layers_of_floats():
        torch.manual_seed(3)
        return nn.ModuleList([Embed(), Block(), Narrow(), Head()]).float()

    def train(rank, group):
        model = Pipeline(
            layers_of_floats(), loss_of, num_microbatches=3, process_group=group, schedule=schedule,
            boundaries=(0, 1, 3, 4),
        )  # fmt: skip
        plain = model.step(tokens, target=target)
        backwards = []
        model.layers[model.present.start].register_full_backward_hook(
            lambda *_: backwards.append(torch.is_autocast_enabled("cpu"))
        )
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.step(tokens, target=target)
            outputs = model.evaluate(tokens)
        gradients = {name: one.grad.clone() for name, one in model.layers.named_parameters() if one.grad is not None}
        handed_on = {boundary[0].dtype for boundary in model._steps._behind.values()}
        assert len(backwards) == 3 and not any(backwards)
        assert model.step(tokens, target=target) == plain
        return handed_on, gradients, loss, outputs

    by_rank = run_ranks(train, 3)
    assert [types for types, *_ in by_rank] == [{torch.float32}, {torch.float32, torch.bfloat16}, set()]
    layers = layers_of_floats()
    total = 0.0
    for part, of_part in zip(tokens.tensor_split(3), target.tensor_split(3), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(chained(layers, part), of_part) * (len(part) / len(tokens))
        loss.backward()
        total += loss.detach()
    *_, loss, outputs = by_rank[-1]
    torch.testing.assert_close(loss, total)
    assert outputs.dtype is torch.bfloat16
    for name, gradient in {name: one for _, own, *_ in by_rank for name, one in own.items()}.items():
        assert torch.equal(gradient, layers.get_parameter(name).grad), name


@on_ranks(2)
def test_what_cannot_be_run_is_refused_on_all_ranks(rank, group):
    model = pipeline(group)
    with pytest.raises(ValueError if rank == 0 else RuntimeError, match=r"no micro-batches|ranks \[0\]"):
        model.step_microbatches([], [])
    tokens, target = sample(0, 4, 3)
    with pytest.raises(ValueError, match="there are 1 targets for 2 micro-batches"):
        model.step_microbatches([(tokens,), (tokens,)], [target])
    assert model.step(tokens, target=target) is not None or rank == 0


@on_ranks(2)
def test_what_layers_hand_on_is_found_anew_after_a_refresh(rank, group):
    class Cut(nn.Module):
        width = WIDTH

        def forward(self, x, mask):
            return x[..., : self.width], mask

    class Sum(nn.Module):
        def forward(self, x, mask):
            return x.sum(dim=1)

    layers = [Embed(), Cut(), Sum()]
    model = Pipeline(layers, loss_of, num_microbatches=2, process_group=group, boundaries=(0, 2, 3))
    tokens, target = sample(0, 4, 3)
    num_bytes = []
    for layers[1].width in (WIDTH, 4):
        model.step(tokens, target=target % 4)
        num_bytes.append(model.message_bytes)
        model.refresh()
    first, second = gathered(group, num_bytes)
    assert first == second
    (_, *usual), (_, *cut) = first  # of two samples of three words: float32 both ways, and a mask
    assert usual == [2 * 3 * (WIDTH * 4 + 0.5)] * 2 + [2 * WIDTH * 4]
    assert cut == [usual[0], 2 * 3 * (4 * 4 + 0.5), 2 * 4 * 4]
