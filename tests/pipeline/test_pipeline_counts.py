"""A pipeline's gradient is that of the mean over all counted targets of the whole batch, whatever the loss says."""

import itertools
import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.counted_losses import CASES, WORDS, batch, masked
from helpers.on_ranks import gathered, on_ranks
from helpers.processes import caught_log_lines
from torch import nn

from zeroresize.pipeline import Pipeline, moving_during_backward

pytestmark = pytest.mark.same_ranks


class Channels(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def layers_of():
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, WORDS), Channels()
    return [layer.double() for layer in layers]


def undivided(expected, *batches):
    """Losses, and the gradients that they add up to, by name."""
    model = nn.ModuleDict({"layers": nn.ModuleList(layers_of())})
    losses = []
    for words, targets in batches:
        loss = expected(nn.Sequential(*model["layers"])(words), targets)
        loss.backward()
        losses.append(loss.item())
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def check(pipeline, expected, losses, gradients=None):
    """This stage's gradients, and the losses where they are known."""
    expected_losses, expected_gradients = expected
    if losses[0] is not None:
        torch.testing.assert_close([loss.item() for loss in losses], expected_losses, rtol=1e-10, atol=1e-12)
    gradients = gradients or {name: each.grad for name, each in pipeline.named_parameters() if each.grad is not None}
    assert gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-10, atol=1e-12, msg=name)


def test_two_stages_count_as_the_undivided_model(run_ranks):
    batches = [batch(0), batch(1)]

    def train(rank, group):
        for (loss, expected, count), schedule in zip(CASES.values(), itertools.cycle(("1f1b", "gpipe"))):
            pipeline = Pipeline(
                layers_of(), loss, num_microbatches=4, process_group=group, schedule=schedule, count=count
            )
            losses = [pipeline.step(words, target=targets) for words, targets in batches]  # their gradients add up
            check(pipeline, undivided(expected, *batches), losses)

    run_ranks(train, 2)


@on_ranks(2)
def test_micro_batches_of_other_sizes_do_too(rank, group):
    words, targets = batch(0)
    for name in ("function", "weights", "sum and count that only the loss knows", "sum of squares"):
        pipeline = Pipeline(layers_of(), CASES[name].loss, num_microbatches=3, process_group=group)
        loss = pipeline.step_microbatches([(part,) for part in words.split((1, 4, 3))], targets.split((1, 4, 3)))
        check(pipeline, undivided(CASES[name].expected, (words, targets)), [loss])


@on_ranks(2)
def test_replicas_count_together(rank, group):
    """Two pipelines of one stage; the first has fewer samples that count, or none at all."""

    pipes = [dist.new_group([member]) for member in range(2)]
    words, targets = batch(0)
    for some in (targets, masked(targets, first=4)):
        for name in ("function", "partial that sums", "weights", "sum and count that only the loss knows"):
            pipeline = Pipeline(
                layers_of(), CASES[name].loss, num_microbatches=2, process_group=pipes[rank], replicas=group
            )  # fmt: skip
            mine = words.chunk(2)[rank], some.chunk(2)[rank]
            loss = pipeline.step(mine[0], target=mine[1])
            sums = {key: parameter.grad.clone() for key, parameter in pipeline.named_parameters()}
            for tensor in (loss, *sums.values()):
                dist.all_reduce(tensor, group=group)
                tensor /= 2
            check(pipeline, undivided(CASES[name].expected, (words, some)), [loss], sums)


@on_ranks(2)
def test_a_batch_that_counts_nothing_is_an_error_on_all_stages(rank, group):
    words, targets = batch(0)
    for name in ("function", "weights", "sum and count", "sum and count that only the loss knows"):
        pipeline = Pipeline(layers_of(), CASES[name].loss, num_microbatches=4, process_group=group)
        for _ in range(2):  # also once it is known that the loss tells afterwards
            with pytest.raises(ValueError if rank else RuntimeError, match=r"there is no mean|of the group failed"):
                pipeline.step(words, target=torch.full_like(targets, -100))
            pipeline.step(words, target=targets)


@on_ranks(2)
def test_layers_that_move_meanwhile_take_scaled_gradients_along(rank, group):
    case, batches = CASES["sum and count that only the loss knows"], [batch(0), batch(1)]
    pipeline = Pipeline(layers_of(), case.loss, num_microbatches=4, process_group=group, boundaries=(0, 2, 5))
    losses = [pipeline.step(batches[0][0], target=batches[0][1])]
    with moving_during_backward(pipeline, (0, 1, 5), optimizer=None):
        losses.append(pipeline.step(batches[1][0], target=batches[1][1]))
    check(pipeline, undivided(case.expected, *batches), losses)


def plain_sum(outputs, targets):
    return (outputs[:, 0] - targets).square().sum()


def plain_mean(outputs, targets):
    return (outputs[:, 0] - targets).square().mean()


def ignoring(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none").mean()


class Unknown(nn.Module):
    ignore_index = 3

    def forward(self, outputs, targets):
        return plain_mean(outputs, targets)


@pytest.mark.parametrize(
    ("loss", "warning"),
    [
        (plain_mean, None),
        (plain_sum, "nothing else is known"),
        (ignoring, "ignores targets"),
        (Unknown(), "ignores targets"),
    ],
)
@on_ranks(2)
def test_what_is_not_known_of_a_loss_is_warned_of_once_where_it_may_be_wrong(rank, group, *, loss, warning):
    words, targets = batch(0)
    pipeline = Pipeline(layers_of(), loss, num_microbatches=4, process_group=group)
    with caught_log_lines(logging.WARNING) as lines:
        for _ in range(2):
            state = torch.get_rng_state()
            pipeline.step(words, target=targets)
            assert torch.equal(state, torch.get_rng_state())
    first, last = gathered(group, lines)
    assert first == [] and [warning in line for line in last] == ([True] if warning else [])
