"""Decoder-only and encoder-decoder models of padded rows: padding and grouping change nothing."""

import numpy as np
import pytest
import torch
from torch import nn

from lm_examples.layers import summed_loss
from lm_examples.microbatches.models import ModelConfig, padded_layers
from zeroresize.microbatch.padded import PaddedBatch, PairBatch
from zeroresize.policy.microbatches.plan import MicroBatch
from zeroresize.runtime.activations import Activation, find_activations

KINDS = {"gpt": (padded_layers, PaddedBatch), "t5": (padded_layers, PairBatch)}


def layers_of(kind, **options):
    torch.manual_seed(0)
    config = ModelConfig(kind=kind, num_blocks=2, hidden_size=16, num_heads=2, vocabulary=19, **options)
    return nn.ModuleList(KINDS[kind][0](config)).double()


def samples_of(kind, number=7, seed=0):
    random = np.random.default_rng(seed)
    rows = [torch.from_numpy(random.integers(1, 19, size)) for size in random.integers(2, 12, 2 * number)]
    return rows[:number] if kind == "gpt" else list(zip(rows[:number], rows[number:], strict=True))


def lengths_of(kind, samples):
    lengths = [[len(row) - 1] for row in samples] if kind == "gpt" else [[len(row) for row in pair] for pair in samples]
    return np.array(lengths)


def summed(layers, kind, samples, groups):
    """Loss and gradients of micro-batches of these samples."""
    lengths, total = lengths_of(kind, samples), 0.0
    layers.zero_grad()
    for group in groups:
        batch = KINDS[kind][1].of(samples, MicroBatch.of(group, lengths))
        x = batch.inputs
        for layer in layers:
            x = layer(x, batch)
        loss = summed_loss(x, batch)
        loss.backward()
        total += loss.item()
    return total, [parameter.grad.clone() for parameter in layers.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_count_the_same_however_they_are_grouped_and_padded(kind):
    layers, samples = layers_of(kind), samples_of(kind)
    alone = summed(layers, kind, samples, [[number] for number in range(7)])
    for groups in ([[0, 1, 2, 3, 4, 5, 6]], [[6, 2], [0, 5, 1], [4], [3]]):
        loss, gradients = summed(layers, kind, samples, groups)
        assert loss == pytest.approx(alone[0], rel=1e-12)
        torch.testing.assert_close(gradients, alone[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_computed_again_is_the_same(kind):
    layers, samples = layers_of(kind), samples_of(kind)
    expected = summed(layers, kind, samples, [[0, 1, 2], [3, 4, 5, 6]])
    for module in layers.modules():
        if hasattr(module, "recompute"):
            module.recompute = True
    loss, gradients = summed(layers, kind, samples, [[0, 1, 2], [3, 4, 5, 6]])
    assert loss == pytest.approx(expected[0])
    torch.testing.assert_close(gradients, expected[1])


def test_a_token_sees_no_later_one():
    layers = layers_of("gpt")
    rows = torch.randint(19, (2, 8), generator=torch.Generator().manual_seed(0))
    rows[1, :5] = rows[0, :5]
    outputs = []
    for row in rows:
        batch = PaddedBatch(row[None], row[None])
        x = batch.inputs
        for layer in layers:
            x = layer(x, batch)
        outputs.append(x[0])
    torch.testing.assert_close(outputs[0][:5], outputs[1][:5])
    assert not torch.allclose(outputs[0][5:], outputs[1][5:])


def test_the_decoder_sees_the_whole_source_and_no_later_target():
    layers = layers_of("t5")
    source, target = samples_of("t5", 1)[0]

    def logits(source, target):
        batch = PairBatch.of([(source, target)], MicroBatch(((0,),), (len(source) + 3, len(target) + 2)))
        x = batch.inputs
        for layer in layers:
            x = layer(x, batch)
        return x[0, : len(target)]

    changed, later = source.clone(), target.clone()
    changed[-1] = (changed[-1] + 1) % 19
    later[-1] = (later[-1] + 1) % 19
    assert not torch.allclose(logits(source, target)[0], logits(changed, target)[0])
    torch.testing.assert_close(logits(source, target), logits(source, later))  # the last one is only a target


def test_what_layers_hand_on_follows_the_sizes_of_micro_batches():
    with torch.device("meta"):
        gpt, t5 = layers_of("gpt"), layers_of("t5")
    row = Activation(("size", "length", 16), torch.float64)
    source, target = (Activation(("size", name, 16), torch.float64) for name in ("source", "target"))
    assert find_activations(gpt, PaddedBatch.hollow, ["size", "length"]) == [(row,)] * 3
    wanted = [(source,)] * 3 + [(source, target)] * 3
    assert find_activations(t5, PairBatch.hollow, ["size", "source", "target"]) == wanted


def test_rows_hold_what_was_planned():
    samples = [torch.arange(1, 5), torch.arange(7, 9), torch.arange(10, 13)]
    batch = PaddedBatch.of(samples, MicroBatch(((0, 1), (2,)), (5,)))
    assert batch.tokens.tolist() == [[1, 2, 3, 7, 0], [10, 11, 0, 0, 0]]
    assert batch.targets.tolist() == [[2, 3, 4, 8, -100], [11, 12, -100, -100, -100]]
    pairs = [(torch.arange(3), torch.arange(5, 7)), (torch.arange(2), torch.arange(8, 9))]
    pair = PairBatch.of(pairs, MicroBatch.of([0, 1], np.array([[3, 2], [2, 1]])))
    assert pair.sources.tolist() == [[0, 1, 2], [0, 1, 0]] and pair.is_source.tolist() == [
        [True] * 3,
        [True, True, False],
    ]
    assert pair.tokens.tolist() == [[0, 5], [0, 0]] and pair.targets.tolist() == [[5, 6], [8, -100]]
    with pytest.raises(ValueError, match=r"samples \[0, 2\] have 5 tokens: their row is planned for 4"):
        PaddedBatch.of(samples, MicroBatch(((0, 2),), (4,)))
