"""Sleeps in place of work: how long in forward and in backward, and that values and gradients stay as they are."""

import pytest
import torch
from helpers.language_models import keep_time

from lm_examples import pace as paces
from lm_examples.gpt import Block, ModelConfig
from lm_examples.pace import Pace

MODEL = ModelConfig(num_blocks=1, hidden_size=8, num_heads=2, context=4)


class Slow(Block):
    """Its computation takes a second in forward, by the clock, and it may return a tuple."""

    def __init__(self, config, extra=()):
        super().__init__(config)
        self.extra = extra

    def forward(self, x):
        paces.time.sleep(1.0)
        y = super().forward(x)
        return (y, *self.extra) if self.extra else y


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    for module in ("zeroresize.pipeline.moving_layers", "zeroresize.pipeline.measuring", "lm_examples.pace"):
        monkeypatch.setattr(f"{module}.time", None)  # put back afterwards
    keep_time()


def blocks_of(num, pace=None, kind=Block, **options):
    torch.manual_seed(0)
    blocks = [kind(MODEL, **options).double() for _ in range(num)]
    if pace is not None:
        pace.hold_up(blocks)
    return blocks


def seconds_of(pace, call):
    before = pace.slept_s
    result = call()
    return result, pytest.approx(pace.slept_s - before)


def test_forward_sleeps_by_work_and_backward_twice_as_long_times_chi():
    pace = Pace(forward_s=0.5)
    (block,) = blocks_of(1, pace)
    block.work, pace.chi = 0.25, 3.0
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    y, forward_s = seconds_of(pace, lambda: block(x))
    block.work, pace.chi = 1.0, 1.0  # of the next micro-batch
    _, backward_s = seconds_of(pace, lambda: y.sum().backward())
    assert forward_s == 0.5 * 0.25 * 3.0 and backward_s == 2 * 0.5 * 0.25 * 3.0


def test_a_straggler_without_sleeps_takes_chi_times_as_long_as_it_computes():
    pace = Pace()
    (block,) = blocks_of(1, pace, Slow)
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    _, seconds = seconds_of(pace, lambda: block(x).sum().backward())
    assert seconds == 0.0
    pace.chi = 4.0
    y, forward_s = seconds_of(pace, lambda: block(x))
    _, backward_s = seconds_of(pace, lambda: y.sum().backward())
    assert forward_s == 3.0 and backward_s == 6.0


def test_frozen_blocks_sleep_once_in_backward_and_a_frozen_prefix_not_at_all():
    pace = Pace(forward_s=1.0)
    prefix, trained, frozen = blocks_of(3, pace)
    for block in (prefix, frozen):
        block.requires_grad_(False)
    y, forward_s = seconds_of(pace, lambda: frozen(trained(prefix(torch.randn(1, 4, 8, dtype=torch.float64)))))
    _, backward_s = seconds_of(pace, lambda: y.sum().backward())
    assert forward_s == 3.0 and backward_s == 1.0 + 2.0


def test_values_gradients_and_names_are_those_of_blocks_that_do_not_sleep():
    results = []
    for pace in (None, Pace(forward_s=0.1)):
        blocks = blocks_of(2, pace)
        x = torch.linspace(-1, 1, 64, dtype=torch.float64).view(2, 4, 8).requires_grad_()
        y = blocks[1](blocks[0](x))
        y.square().sum().backward()
        named = [(name, one.grad) for block in blocks for name, one in block.named_parameters()]
        results.append((y, x.grad, named))
    (y, dx, named), (other_y, other_dx, other_named) = results
    assert torch.equal(y, other_y) and torch.equal(dx, other_dx)
    assert [name for name, _ in named] == [name for name, _ in other_named]
    assert all(torch.equal(dw, other) for (_, dw), (_, other) in zip(named, other_named, strict=True))
