"""Stages that carry out instructions train as the undivided model does, and wait for ever where a plan says so."""

import math
import os
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.naive_messages import naive_instructions
from helpers.on_ranks import gathered, on_ranks
from helpers.processes import told_by_survivors
from torch import nn
from torch.nn import functional as F

from zeroresize.plan.partition import Partition
from zeroresize.runtime.activations import (
    Activation,
    TensorShape,
    as_tuple,
    find_activations,
    from_text,
    message_bytes,
    to_text,
)
from zeroresize.runtime.instructions import DeadlockError, Kind, check, planned_instructions
from zeroresize.runtime.schedules import adaptive_orders, orders_of
from zeroresize.runtime.stage import Stage

pytestmark = pytest.mark.same_ranks

WIDTH, NUM_LAYERS = 6, 8


class Rows:
    """A micro-batch of [B, L, D], with another tensor [B, S, D] that layers hand on beside it."""

    def __init__(self, sizes, generator=None):
        self.sizes = dict(sizes)
        shapes = ((sizes["size"], sizes[name], WIDTH) for name in ("source", "target"))
        self.source, self.target = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)

    @property
    def inputs(self):
        return self.source


class Encoder(nn.Module):
    """Source to source."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x, batch):
        return x + self.dropout(torch.tanh(self.linear(x)))


class Decoder(nn.Module):
    """Source, or source and target, to both: the source passes through, unless its weights are of use there, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, batch):
        source, target = (x, batch.target) if isinstance(x, torch.Tensor) else x
        return source, target + torch.tanh(self.linear(target) + source.mean(dim=1, keepdim=True))


def layers_of():
    torch.manual_seed(0)
    return nn.ModuleList([Encoder(), Encoder(), Encoder(), *(Decoder() for _ in range(NUM_LAYERS - 3))]).double()


def loss_of(x, batch):
    return F.mse_loss(x[1], batch.target.flip(0), reduction="sum") + x[0].square().sum()


def batches_of(number, seed=0):
    generator, random = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    sizes = [
        dict(zip(("size", "source", "target"), random.integers(1, 7, 3).tolist(), strict=True)) for _ in range(number)
    ]
    return [Rows(each, generator) for each in sizes]


def activations_of(layers):
    return find_activations(layers, Rows, ["size", "source", "target"])


def work_of(batches):
    return np.array([[math.prod(batch.sizes.values())] for batch in batches], dtype=np.float64)


def orders_by(schedule, num_stages, batches):
    work = work_of(batches)
    if schedule == "adaptive":
        num_bytes = np.broadcast_to(work, (len(batches), num_stages))
        return adaptive_orders(num_bytes, [2.5 * work.max()] * num_stages)
    return orders_of(schedule, num_stages, len(batches))


def planned(schedule, num_stages, batches):
    seconds = np.broadcast_to(work_of(batches), (len(batches), num_stages))
    stages = planned_instructions(orders_by(schedule, num_stages, batches), seconds, 2.0 * seconds)
    check(stages, len(batches))
    return stages


def stage_of(layers, group, **options):
    boundaries = Partition.uniform(len(layers), group.size()).boundaries
    begin, end = boundaries[group.rank()], boundaries[group.rank() + 1]
    part = layers[begin:end]
    return Stage(list(part), begin, activations_of(layers), group, torch.device("cpu"), 7, **options), part


def gradients_of(layers, group, schedule, batches, **options):
    stage, part = stage_of(layers, group, **options)
    layers.zero_grad()
    loss = stage.train(planned(schedule, group.size(), batches)[group.rank()], batches, loss_of)
    gradients = [parameter.grad for parameter in part.parameters()]
    return loss, part, gradients


@pytest.mark.parametrize(("num_stages", "number"), [(1, 3), (2, 7), (4, 2), (3, 0)])
def test_schedules_add_up_the_undivided_models_gradients(run_ranks, num_stages, number):
    """Of micro-batches whose sizes all differ, with tuples that are handed on; more or fewer than stages, or none."""

    def check_rank(rank, group):
        layers, batches = layers_of().eval(), batches_of(number)
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            x = batch.inputs
            for layer in layers:
                x = layer(x, batch)
            total = total + loss_of(x, batch)
        if number:
            total.backward()
        stage, part = stage_of(layers, group)
        wanted = [parameter.grad for parameter in part.parameters()]
        here = total.detach() if rank == num_stages - 1 else torch.zeros_like(total)
        torch.testing.assert_close(stage.evaluate(batches, loss_of), here)
        for schedule in ("gpipe", "1f1b", "adaptive") if number else ():
            for recompute in ("none", "layers"):
                loss, _, gradients = gradients_of(layers, group, schedule, batches, recompute=recompute)
                assert not loss.requires_grad
                torch.testing.assert_close(loss, here)
                for gradient, expected in zip(gradients, wanted, strict=True):
                    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)

    run_ranks(check_rank, num_stages)


@on_ranks(2)
def test_a_frozen_first_stage_runs_no_backward(rank, group, *, monkeypatch):
    layers, batches = layers_of().eval(), batches_of(4)
    for layer in layers[:4]:
        layer.requires_grad_(False)
    if rank == 0:
        monkeypatch.setattr(torch.autograd, "backward", lambda *_: pytest.fail("a frozen first stage runs backward"))
    _, _, gradients = gradients_of(layers, group, "1f1b", batches)
    assert all((gradient is None) == (rank == 0) for gradient in gradients)


@on_ranks(2)
def test_random_numbers_follow_the_micro_batch_whatever_the_schedule_and_recomputation(rank, group):
    layers, batches = layers_of(), batches_of(5)
    expected = gradients_of(layers, group, "gpipe", batches)
    for options in ({}, {"recompute": "layers"}):
        loss, _, gradients = gradients_of(layers, group, "1f1b", batches, **options)
        torch.testing.assert_close(loss, expected[0])
        torch.testing.assert_close(gradients, expected[2], rtol=1e-10, atol=1e-12)
    other, _, _ = gradients_of(layers, group, "1f1b", list(reversed(batches)))
    assert rank == 0 or not torch.allclose(other, expected[0])


@on_ranks(3)
def test_as_much_is_kept_as_the_schedule_says(rank, group):
    """Counted: inputs and outputs of a stage that live at once, by its orders."""

    layers, batches = layers_of(), batches_of(9)
    under_way = [0]

    def count(instruction):
        under_way.append(under_way[-1] + (1 if instruction.kind is Kind.FORWARD else -1))
        living = sum(reference() is not None for reference in outputs)
        # the newest one is still in the hands of who called, as are those that are being sent
        assert living <= under_way[-1] + 2

    outputs = []
    stage, part = stage_of(layers, group, on_computed=count)
    part[-1].register_forward_hook(lambda _, inputs, output: outputs.append(weakref.ref(as_tuple(output)[-1])))
    stage.train(planned("1f1b", group.size(), batches)[rank], batches, loss_of)
    assert not any(reference() is not None for reference in outputs)
    assert gathered(group, max(under_way)) == [3, 2, 1]


def test_a_naive_plan_waits_for_ever_for_real_where_the_check_says_so(run_ranks):
    """Both send first, each waits for the other's receive; the same orders run with planned messages."""
    batches = batches_of(4)
    orders = orders_of("1f1b", 2, 4)
    naive = naive_instructions(orders)
    with pytest.raises(DeadlockError):
        check(naive, 4)

    def check_rank(rank, group):
        impatient = dist.new_group(timeout=timedelta(seconds=3))
        stage, _ = stage_of(layers_of(), impatient)
        stage.train(planned("1f1b", 2, batches)[rank], batches, loss_of)
        begin = time.monotonic()
        with pytest.raises(
            RuntimeError, match=r"Wait(SendAct|SendGrad|RecvAct|RecvGrad)\(\d\) failed, the .* of micro-batch"
        ):
            stage.train(naive[rank], batches, loss_of)
        return time.monotonic() - begin

    assert max(run_ranks(check_rank, 2, timeout_s=20)) < 15.0


def test_a_stage_that_dies_between_two_instructions_is_named(tmp_path):
    def check_rank(rank, group):
        layers, batches = layers_of(), batches_of(6)
        computed = []

        def die(instruction):
            computed.append(instruction)
            if rank == 1 and len(computed) == 4:
                os._exit(0)

        stage, _ = stage_of(layers, group, on_computed=die)
        with pytest.raises(RuntimeError) as caught:
            stage.train(planned("1f1b", 3, batches)[rank], batches, loss_of)
        return str(caught.value)

    texts = told_by_survivors(check_rank, 3, tmp_path)
    assert texts.keys() == {0, 2}
    for text in texts.values():
        assert "of micro-batch" in text and "with stage 1" in text and "ranks [1] of the group" in text


@on_ranks(2)
def test_what_layers_hand_on_otherwise_than_on_the_meta_device_is_named(rank, group):
    class Other(Encoder):
        def forward(self, x, batch):
            y = super().forward(x, batch)
            return y if x.is_meta else y.float()

    layers, batches = layers_of(), batches_of(2)
    layers[3] = Other().double()
    stage, _ = stage_of(layers, group)
    if rank == 0:
        with pytest.raises(
            ValueError, match=r"stage 0 hands on torch.float32 .* of micro-batch 0, where torch.float64"
        ):
            stage.train(planned("1f1b", 2, batches)[rank], batches, loss_of)


IDS = TensorShape((4, 3), torch.int64, requires_grad=False)
HIDDEN = TensorShape((4, 3, 8), torch.float32)
HALF = TensorShape((2, 5), torch.bfloat16)


def test_messages_have_the_bytes_of_activations_and_of_the_gradients_that_come_back():
    # 96 bytes go forward and none comes back; 384 each way; 20 each way beside 96 forward.
    assert [message_bytes(one) for one in ((IDS,), (HIDDEN,), (HALF, IDS), ())] == [48.0, 384.0, 68.0, 0.0]
    assert HIDDEN.num_bytes == HIDDEN.empty(torch.device("cpu")).nbytes


def test_a_text_tells_boundaries():
    boundaries = [(IDS, HALF), (HIDDEN,), ()]
    assert from_text(to_text(boundaries)) == boundaries


class Tokens:
    """A micro-batch of so many integers."""

    def __init__(self, sizes):
        self.sizes, self.inputs = dict(sizes), torch.arange(sizes["tokens"])


class Returns(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.give = give

    def forward(self, x, batch):
        return self.give(x)


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda x: x.long(), r"layer 1 \(Returns\) returns torch\.int64 \[\d+\]"),
        (lambda x: [x.double()], r"layer 1 \(Returns\) returns list"),
        (lambda x: (x.double(), x.long()), r"layer 1 \(Returns\) returns \(torch.float64 \[5\], torch.int64 \[5\]\)"),
        (lambda x: (), r"layer 1 \(Returns\) returns \(\)"),
        (lambda x: (x.double(),) * len(x), r"layer 1 \(Returns\) returns .* as many tensors"),
        (lambda x: x.double()[1:], r"layer 1 \(Returns\) returns .* \[4\] for tokens 5 and .* \[6\] for tokens 7"),
        (lambda x: torch.from_numpy(x.numpy()), r"layer 1 \(Returns\) does not run on the meta device.* x = torch.f"),
    ],
)
def test_layers_whose_output_a_pipeline_cannot_hand_on_are_errors(give, message):
    with pytest.raises(ValueError, match=message):
        find_activations([Returns(lambda x: x.double()), Returns(give), Returns(lambda x: x)], Tokens, ["tokens"])


def test_dimensions_follow_the_sizes_that_they_have():
    layers = [Returns(lambda x: x[:, None].double() + x), Returns(lambda x: (x.sum(0), x.mean())), Returns(lambda x: x)]
    square, pair = find_activations(layers, Tokens, ["tokens"])
    assert square == (Activation(("tokens", "tokens"), torch.float64),)
    assert pair == (Activation(("tokens",), torch.float64), Activation((), torch.float64))
    assert square[0].of({"tokens": 4}).shape == (4, 4) and pair[1].of({"tokens": 4}).num_bytes == 8
