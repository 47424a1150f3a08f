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
from helpers.processes import told_by_survivors
from torch import nn
from torch.nn import functional as F

from zeroresize.plan.partition import Partition
from zeroresize.runtime.activations import Activation, as_tuple, find_activations
from zeroresize.runtime.adaptive_schedule import adaptive_orders
from zeroresize.runtime.check import DeadlockError, check
from zeroresize.runtime.communication import planned_instructions
from zeroresize.runtime.instructions import Kind
from zeroresize.runtime.schedules import orders_of
from zeroresize.runtime.stage import Stage

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


@pytest.mark.parametrize("recompute", ["none", "layers"])
@pytest.mark.parametrize(("num_stages", "number"), [(1, 3), (2, 7), (4, 6), (4, 2)])
def test_schedules_add_up_the_undivided_models_gradients(run_ranks, num_stages, number, recompute):
    """Of micro-batches whose sizes all differ, with tuples that are handed on."""

    def check_rank(rank, group):
        layers, batches = layers_of().eval(), batches_of(number)
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            x = batch.inputs
            for layer in layers:
                x = layer(x, batch)
            total = total + loss_of(x, batch)
        total.backward()
        wanted = [parameter.grad for parameter in stage_of(layers, group)[1].parameters()]
        for schedule in ("gpipe", "1f1b", "adaptive"):
            loss, _, gradients = gradients_of(layers, group, schedule, batches, recompute=recompute)
            torch.testing.assert_close(loss, total.detach() if rank == num_stages - 1 else torch.zeros_like(loss))
            for gradient, expected in zip(gradients, wanted, strict=True):
                torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)

    run_ranks(check_rank, num_stages)


def test_random_numbers_follow_the_micro_batch_whatever_the_schedule_and_recomputation(run_ranks):
    def check_rank(rank, group):
        layers, batches = layers_of(), batches_of(5)
        expected = gradients_of(layers, group, "gpipe", batches)
        for options in ({}, {"recompute": "layers"}):
            loss, _, gradients = gradients_of(layers, group, "1f1b", batches, **options)
            torch.testing.assert_close(loss, expected[0])
            torch.testing.assert_close(gradients, expected[2], rtol=1e-10, atol=1e-12)
        other, _, _ = gradients_of(layers, group, "1f1b", list(reversed(batches)))
        assert rank == 0 or not torch.allclose(other, expected[0])

    run_ranks(check_rank, 2)


def test_as_much_is_kept_as_the_schedule_says(run_ranks):
    """Counted: inputs and outputs of a stage that live at once, by its orders."""

    def check_rank(rank, group):
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
        return max(under_way)

    assert run_ranks(check_rank, 3) == [3, 2, 1]


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


def test_what_layers_hand_on_otherwise_than_on_the_meta_device_is_named(run_ranks):
    class Other(Encoder):
        def forward(self, x, batch):
            y = super().forward(x, batch)
            return y if x.is_meta else y.float()

    def check_rank(rank, group):
        layers, batches = layers_of(), batches_of(2)
        layers[3] = Other().double()
        stage, _ = stage_of(layers, group)
        if rank == 0:
            with pytest.raises(
                ValueError, match=r"stage 0 hands on torch.float32 .* of micro-batch 0, where torch.float64"
            ):
                stage.train(planned("1f1b", 2, batches)[rank], batches, loss_of)

    run_ranks(check_rank, 2)


def test_a_single_stage_is_told_messages(run_ranks):
    def check_rank(rank, group):
        stage, _ = stage_of(layers_of(), group)
        with pytest.raises(ValueError, match=r"RecvActStart\(0\): it has nobody"):
            stage.train(planned("1f1b", 2, batches_of(1))[1], batches_of(1), loss_of)

    run_ranks(check_rank, 1)


def test_shapes_follow_each_size():
    source = Activation(("size", "source", WIDTH), torch.float64)
    target = Activation(("size", "target", WIDTH), torch.float64)
    activations = activations_of(layers_of())
    assert activations == [(source,)] * 3 + [(source, target)] * (NUM_LAYERS - 4)
    assert target.of({"size": 2, "source": 3, "target": 4}).num_bytes == 2 * 4 * WIDTH * 8
