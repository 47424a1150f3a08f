"""A pipeline of packed micro-batches of any number and size computes what the undivided model does."""

import os

import pytest
import torch
from helpers.processes import told_by_survivors
from torch import nn

from lm_examples.llama import LlamaConfig, llama_layers, token_loss
from zeroresize.plan.partition import Partition
from zeroresize.runtime.activations import Activation, find_activations
from zeroresize.runtime.communication import instructions_of
from zeroresize.runtime.stage import Stage
from zeroresize.strategy.packed import Packed

CONFIG = LlamaConfig(num_blocks=3, hidden_size=8, num_heads=2, mlp_size=12, vocabulary=16)


def layers_of():
    torch.manual_seed(0)
    return nn.ModuleList(llama_layers(CONFIG)).double()


def activations_of():
    with torch.device("meta"):
        return activations_between(nn.ModuleList(llama_layers(CONFIG)).double())


def activations_between(layers):
    return find_activations(layers, Packed.hollow, ["tokens"])


def micro_batches_of(number):
    generator = torch.Generator().manual_seed(1)
    lengths = [(3, 2), (9,), (1, 1, 4), (2,), (7, 3), (5,)][:number]
    return [Packed.of([torch.randint(16, (one + 1,), generator=generator) for one in own]) for own in lengths]


def undivided(layers, number):
    total = torch.zeros((), dtype=torch.float64)
    for packed in micro_batches_of(number):
        x = packed.tokens
        for layer in layers:
            x = layer(x, packed)
        total = total + token_loss(x, packed)
    return total


def stage_of(layers, group):
    if group.size() == 1:
        return Stage(list(layers), 0, activations_of(), None, torch.device("cpu")), layers
    boundaries = Partition.uniform(len(layers), group.size()).boundaries
    begin, end = boundaries[group.rank()], boundaries[group.rank() + 1]
    part = layers[begin:end]
    return Stage(list(part), begin, activations_of(), group, torch.device("cpu")), part


def instructions_for(group, number):
    return instructions_of("1f1b", group.size(), number)[group.rank()]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_add_up_the_undivided_models_gradients(run_ranks, num_stages):
    def check(rank, group):
        layers = layers_of()
        stage, part = stage_of(layers, group)
        for number in (1, 0, 6, 3):  # with as many, fewer and more than stages; one after the other in one group
            layers.zero_grad()
            wanted = undivided(layers, number)
            if number:
                wanted.backward()
            gradients = [parameter.grad for parameter in part.parameters()]
            layers.zero_grad()
            micro_batches = micro_batches_of(number)
            for mean in (
                stage.train(instructions_for(group, number), micro_batches, token_loss),
                stage.evaluate(micro_batches, token_loss),
            ):
                assert not mean.requires_grad
                torch.testing.assert_close(mean, wanted.detach() if stage.is_last else torch.zeros_like(mean))
            for parameter, gradient in zip(part.parameters(), gradients, strict=True):
                assert (gradient is None) == (number == 0)
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
            assert all(one.grad is None for one in layers.parameters() if not any(one is p for p in part.parameters()))

    run_ranks(check, num_stages)


def test_frozen_stages_and_as_few_forwards_ahead_as_1f1b_needs(run_ranks):
    def check(rank, group):
        layers = layers_of()
        for number in (0, 1, 3):
            layers[number].requires_grad_(False)
        stage, part = stage_of(layers, group)
        held, most = 0, 0

        def count(change):
            def hook(*_):
                nonlocal held, most
                held += change
                most = max(most, held)

            return hook

        part[0].register_forward_hook(count(1))
        undivided(layers, 6).backward()
        wanted = [parameter.grad for parameter in part.parameters()]
        layers.zero_grad()
        held = most = 0
        backward = torch.autograd.backward
        torch.autograd.backward = lambda *args: (backward(*args), count(-1)())
        if rank == 0:  # nothing to be learnt there: no backward
            torch.autograd.backward = lambda *_: pytest.fail("a frozen first stage runs backward")
        stage.train(instructions_for(group, 6), micro_batches_of(6), token_loss)
        for parameter, gradient in zip(part.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
        assert rank == 0 or most == group.size() - rank

    run_ranks(check, 3)


def test_a_dead_stage_is_named_by_its_neighbours(tmp_path):
    def check(rank, group):
        layers = layers_of()
        stage, part = stage_of(layers, group)
        if rank == 1:
            calls = []
            part[0].register_forward_hook(lambda *_: os._exit(0) if calls else calls.append(1))
        with pytest.raises(RuntimeError) as caught:
            stage.train(instructions_for(group, 6), micro_batches_of(6), token_loss)
        return str(caught.value)

    messages = told_by_survivors(check, 3, tmp_path)
    assert messages.keys() == {0, 2}
    assert all("ranks [1] of the group (ranks [1] of the job) failed" in one for one in messages.values()), messages


def test_activations_are_those_between_whole_layers():
    assert activations_of() == [(Activation(("tokens", 8), torch.float64),)] * 4
    assert activations_of()[0][0].of({"tokens": 3}).num_bytes == 192


class Returns(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.give = give

    def forward(self, x, packed):
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
        activations_between([Returns(lambda x: x.double()), Returns(give), Returns(lambda x: x)])


def test_dimensions_follow_the_sizes_that_they_have():
    layers = [Returns(lambda x: x[:, None].double() + x), Returns(lambda x: (x.sum(0), x.mean())), Returns(lambda x: x)]
    square, pair = activations_between(layers)
    assert square == (Activation(("tokens", "tokens"), torch.float64),)
    assert pair == (Activation(("tokens",), torch.float64), Activation((), torch.float64))
    assert square[0].of({"tokens": 4}).shape == (4, 4) and pair[1].of({"tokens": 4}).num_bytes == 8


def test_shapes_of_a_recurrent_layer_are_found_by_few_tokens():
    """It computes them one after another, on the meta device too."""
    num_tokens = []

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 6)

        def forward(self, x, packed):
            num_tokens.append(packed.num_tokens)
            if packed.num_tokens > 1000:
                pytest.fail(f"{packed.num_tokens} tokens")
            return self.lstm(x)[0]

    embedding = Returns(lambda x: x.float()[:, None].expand(-1, 4))
    assert activations_between([embedding, Recurrent(), Returns(lambda x: x)])[1] == (
        Activation(("tokens", 6), torch.float32),
    )
    assert len(num_tokens) == 2
