"""Training under several strategies is by the mean over all counted tokens, whatever the loss says."""

import logging

import pytest
import torch
import torch.nn.functional as F
from helpers.processes import caught_log_lines
from helpers.strategies import VOCABULARY, layers_of, own_part, whole_tensors

from zeroresize.plan.strategy import LengthRange, Strategy
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.packed import Packed
from zeroresize.strategy.trainer import StrategyTrainer

STRATEGIES = [Strategy(2), Strategy(1, 2), Strategy(1, 1, 2)]
RANGES = [LengthRange(*each) for each in zip((4, 8, 16), STRATEGIES, strict=True)]
WEIGHT = torch.linspace(0.0, 2.0, VOCABULARY, dtype=torch.float64)
IGNORED = 0
RATE = 0.1


def loss_of(**options):
    return lambda output, packed: F.cross_entropy(output, packed.targets, **options)


def knowing(output, packed):
    """The count comes from the loss alone, which looks at outputs, so that it cannot be asked before."""
    assert float(output.detach().abs().max()) < 1e9
    losses = F.cross_entropy(output, packed.targets, ignore_index=IGNORED, reduction="none")
    return losses.sum(), count(packed)


def squares(output, packed):
    return (output[:, 0] - packed.targets).square().sum()


def squares_that_count(output, packed):
    return ((output[:, 0] - packed.targets).square() * (packed.targets != IGNORED)).sum()


def count(packed):
    return (packed.targets != IGNORED).sum()


masked = loss_of(ignore_index=IGNORED)
#: The loss, what it is of a whole batch, and the user's count; more of them are tested by themselves.
CASES = [
    (loss_of(ignore_index=IGNORED, reduction="sum"), masked, None),
    (loss_of(weight=WEIGHT, ignore_index=IGNORED), loss_of(weight=WEIGHT, ignore_index=IGNORED), None),
    (knowing, masked, None),
    (squares_that_count, lambda output, packed: squares_that_count(output, packed) / count(packed), count),
    (squares, lambda output, packed: squares(output, packed) / packed.num_tokens, None),
]  # fmt: skip


def batch(seed, kinds=VOCABULARY):
    """Sequences of each range; of the shortest, and of one other, nothing but the first token counts."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, kinds, (length + 1,), generator=generator) for length in (2, 3, 4, 4, 6, 8, 8, 12, 16, 9)]
    for number, row in enumerate(rows):
        row[1 + number // 2 :: 2] = IGNORED
        if number in (0, 1, 7):
            row[1:] = IGNORED
    return rows


def undivided(loss, rows):
    """The loss, and the weights after a step."""
    layers = layers_of(num_blocks=1)
    packed = Packed.of(rows)
    x = packed.tokens
    for layer in layers:
        x = layer(x, packed)
    value = loss(x, packed)
    value.backward()
    return value.item(), {name: weight.detach() - RATE * weight.grad for name, weight in whole_tensors(layers).items()}


def trainer_of(group, loss, count=None):
    model = SwitchableModel(layers_of(num_blocks=1), strategies=STRATEGIES, process_group=group)
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}], lr=RATE)
    return StrategyTrainer(model, optimizer, RANGES, loss=loss, max_tokens=16, count=count)


def test_losses_count_as_undivided(run_ranks):
    rows = batch(0)

    def train(rank, group):
        for loss, expected, user_count in CASES:
            trainer = trainer_of(group, loss, user_count)
            value, wholes = undivided(expected, rows)
            for got in (trainer.evaluate(rows), trainer.step(rows).loss):
                assert got == pytest.approx(value, rel=1e-10), loss
            for name, parameter in trainer.model.named_parameters():
                part = own_part(trainer.model, trainer.model.optimizer_strategy, name, wholes[name])
                torch.testing.assert_close(parameter.detach(), part, rtol=1e-10, atol=1e-12, msg=name)

    run_ranks(train, 2)


def test_a_batch_that_counts_nothing_is_an_error_on_all_ranks_and_rank_0_warns_once_of_what_is_not_known(run_ranks):
    nothing = [torch.full_like(row, IGNORED) for row in batch(0)]

    def train(rank, group):
        lines_of_each = []
        for loss in (masked, knowing, squares):
            trainer = trainer_of(group, loss)
            before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
            for call in (trainer.step, trainer.evaluate) if loss != squares else ():
                with pytest.raises(ValueError, match="there is no mean"):
                    call(nothing)
                trainer.model.abandon()
            assert all(map(torch.equal, before, trainer.model.parameters()))
            with caught_log_lines(logging.WARNING) as lines:
                for _ in range(2):
                    trainer.step(batch(0)[:5])
            lines_of_each.append(lines)
        return lines_of_each

    (*known, unknown), (*others, other) = run_ranks(train, 2)
    assert known == others == [[], []]
    assert ["nothing else is known" in line for line in unknown + other] == [True]
