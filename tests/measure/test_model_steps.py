"""What hooks tell of a step of any model: busy, before the forward, in products, waiting; nothing else changes."""

import gc
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroresize.measure import model_steps, waits
from zeroresize.measure.model_steps import ModelSteps
from zeroresize.utils.torch_private import hooks_of


class Timed(nn.Module):
    """Takes a second in each forward."""

    def __init__(self, clock, module, seconds=1.0):
        super().__init__()
        self.module, self.clock, self.seconds = module, clock, seconds

    def forward(self, x):
        self.clock.advance(self.seconds)
        return self.module(x)


class TimedLinear(nn.Linear):
    def __init__(self, clock, seconds):
        super().__init__(4, 4)
        self.clock, self.seconds = clock, seconds

    def forward(self, x):
        self.clock.advance(self.seconds)
        return super().forward(x)


@pytest.fixture
def steps_of(clock, monkeypatch):
    monkeypatch.setattr(model_steps, "clock_for", lambda device: clock)
    monkeypatch.setattr(model_steps, "_TIMED_EVERY", 1)
    return ModelSteps


def model_of(clock):
    return nn.Sequential(TimedLinear(clock, 2.0), Timed(clock, nn.GELU()), TimedLinear(clock, 3.0))


def end(steps):
    (step,) = steps.end_step()
    return step


def test_a_step_is_split_into_what_comes_before_the_forward_products_and_the_rest(clock, steps_of):
    model = model_of(clock)
    steps = steps_of(model)
    x = torch.randn(2, 4)
    clock.advance(5.0)  # a batch is fetched
    loss = model(x).sum()
    clock.advance(20.0)
    loss.backward()
    clock.advance(7.0)  # the optimizer
    step = end(steps)
    assert (step.busy_s, step.loader_s, step.products_s) == (5.0 + 6.0 + 20.0 + 7.0, 5.0, 3.0 * 5.0)
    model(x).sum().backward()
    step = end(steps)  # products cannot take more than all of it
    assert (step.loader_s, step.wait_s, step.products_s) == (0.0, 0.0, 6.0)


def test_waits_inside_a_module_are_no_products(clock, steps_of):
    class Waiting(TimedLinear):
        def forward(self, x):
            steps._timer.wait_begins()  # as for weights that FSDP gathers
            clock.advance(10.0)
            steps._timer.wait_ends()
            return super().forward(x)

    model = nn.Sequential(Waiting(clock, 1.0))
    steps = steps_of(model)
    model(torch.randn(2, 4)).sum()
    clock.advance(9.0)
    step = end(steps)
    assert (step.busy_s, step.wait_s, step.products_s) == (10.0, 10.0, 3.0)


def test_batches_come_before_each_forward_and_an_evaluation_is_no_forward(clock, steps_of):
    model = model_of(clock)
    steps = steps_of(model)
    for _ in range(3):
        clock.advance(4.0)
        model(torch.randn(2, 4)).sum().backward()
    step = end(steps)
    assert (step.busy_s, step.loader_s) == (3 * (4.0 + 6.0), 3 * 4.0)
    with torch.no_grad():
        model(torch.randn(2, 4))
    model(torch.randn(2, 4)).sum().backward()
    step = end(steps)
    assert (step.busy_s, step.loader_s, step.products_s) == (12.0, 6.0, 6.0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_computed_again_in_a_backward_is_no_product_of_the_forward(clock, steps_of, use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = TimedLinear(clock, 2.0)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    model = Checkpointed()
    steps = steps_of(model)
    model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    clock.advance(10.0)
    step = end(steps)
    assert (step.busy_s, step.products_s) == (14.0, 6.0)


def num_hooks(model):
    kinds = ("forward", "forward_pre", "backward")
    of_modules = sum(len(hooks_of(module, kind)) for module in model.modules() for kind in kinds)
    return of_modules + sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())


def test_of_steps_that_are_left_out_nothing_is_timed(clock, steps_of):
    model = model_of(clock)
    steps = steps_of(model)
    for number in range(3):
        model(torch.randn(2, 4)).sum().backward()
        (step,) = steps.end_step(goes_on=False)
        assert (step.busy_s, step.inputs, step.products_s) == (6.0, 8.0, 6.0)
        steps.pause()
        assert steps._timer not in [reference() for reference in waits._listeners]
        for _ in range(number):
            model(torch.randn(2, 4)).sum().backward()
        clock.advance(100.0)
        steps.begin_step()


@pytest.mark.parametrize("ends", ["close", "garbage"])
def test_nothing_is_left_when_it_is_closed_or_let_go_of(clock, steps_of, ends):
    model = model_of(clock)
    steps = steps_of(model)
    model(torch.randn(2, 4)).sum().backward()
    assert num_hooks(model) > 0
    if ends == "close":
        steps.close()
    del steps
    gc.collect()
    assert num_hooks(model) == 0
    model(torch.randn(2, 4)).sum().backward()


def test_only_one_step_of_some_times_its_products(clock, monkeypatch):
    monkeypatch.setattr(model_steps, "clock_for", lambda device: clock)
    model = model_of(clock)
    steps, seen = ModelSteps(model), []
    for _ in range(10):
        num_hooks_of_step = len(hooks_of(model[0], "forward"))
        model(torch.randn(2, 4)).sum().backward()
        seen.append((num_hooks_of_step, not math.isnan(end(steps).products_s)))
    assert seen == [(0, False), (0, False), (1, True), (0, False), (0, False)] * 2


def test_of_many_products_some_stand_for_all_by_the_sizes_of_their_weights(clock, monkeypatch, steps_of):
    monkeypatch.setattr(model_steps, "_MOST_PRODUCTS", 3)
    model = nn.Sequential(*[TimedLinear(clock, 1.0) for _ in range(9)])
    steps = steps_of(model)
    assert [len(hooks_of(layer, "forward")) for layer in model] == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    model(torch.randn(2, 4)).sum()
    clock.advance(100.0)
    assert end(steps).products_s == 3 * 9.0
