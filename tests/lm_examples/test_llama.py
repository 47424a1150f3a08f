"""Packed sequences give what each gives alone, and shards of the heads add up to the whole."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lm_examples.llama import Attention, LlamaConfig, llama_layers, token_loss
from zeroresize.strategy.packed import Packed

LENGTHS = (3, 5, 5, 1, 4, 4, 4)


def config_of(**shape):
    return LlamaConfig(**({"num_blocks": 2, "hidden_size": 16, "num_heads": 4, "vocabulary": 32} | shape))


def layers_of(**shape):
    torch.manual_seed(0)
    return nn.ModuleList(llama_layers(config_of(**shape))).double()


def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(32, (length + 1,), generator=generator) for length in LENGTHS]


def run(layers, packed):
    x = packed.tokens
    for layer in layers:
        x = layer(x, packed)
    return x


@pytest.mark.parametrize("num_kv_heads", [None, 2])
def test_packed_sequences_give_what_each_gives_alone(num_kv_heads):
    layers = layers_of(num_kv_heads=num_kv_heads)
    packed = Packed.of(sequences())
    logits = run(layers, packed)
    loss = token_loss(logits, packed)
    gradients = torch.autograd.grad(loss, list(layers.parameters()))

    alone = [Packed.of([one]) for one in sequences()]
    logits_alone = [run(layers, one) for one in alone]
    losses = [token_loss(*pair) for pair in zip(logits_alone, alone, strict=True)]
    torch.testing.assert_close(logits, torch.cat(logits_alone), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss, sum(losses), rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(sum(losses), list(layers.parameters()))
    for gradient, other in zip(gradients, wanted, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-12)


def test_attention_sees_what_came_before_and_how_far_away_it_was():
    torch.manual_seed(2)
    attention = Attention(config_of()).double()
    for linear in (attention.qkv, attention.out):
        nn.init.normal_(linear.weight)
    x = torch.randn(5, 16, dtype=torch.float64)
    packed = Packed.of([torch.zeros(6, dtype=torch.int64)])
    y = attention(x, packed)
    later, swapped = x.clone(), x[[1, 0, 2, 3, 4]]
    later[3] += 1.0
    assert torch.equal(attention(later, packed)[:3], y[:3])
    assert not torch.isclose(attention(later, packed)[3], y[3], rtol=1e-3).all()
    assert not torch.isclose(attention(swapped, packed)[4], y[4], rtol=1e-3).all()  # without positions they are equal
    shifted = SimpleNamespace(lengths=packed.lengths, positions=packed.positions + 7)
    torch.testing.assert_close(attention(x, shifted), y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("counts", [(1, 1), (2, 0)])
def test_shards_of_the_units_add_up_to_the_whole_layer(counts):
    whole = layers_of(num_kv_heads=2)[1]
    packed = Packed.of(sequences())
    x = torch.randn(packed.num_tokens, 16, dtype=torch.float64)
    for module, segment in zip(("attention", "mlp"), whole.segments(), strict=True):
        call = (packed,) if module == "attention" else ()
        wanted = whole.get_submodule(module)(x, *call)
        num_units = whole.get_submodule(segment.row).in_features // segment.unit_size
        assert num_units == {"attention": 2, "mlp": 48}[module]
        begin, outputs = 0, []
        # Of each parameter: the dimension of units, and the blocks that hold all units each.
        places = [*((name, 0, segment.parts or 1) for name in segment.column), (segment.row, 1, 1)]
        for count in counts:
            shard = layers_of(num_kv_heads=2)[1]
            units = count * num_units // 2
            for name, dim, blocks in places:
                linear = shard.get_submodule(name)
                parts = linear.weight.detach().unflatten(dim, (blocks, num_units, -1)).narrow(dim + 1, begin, units)
                linear.weight = nn.Parameter(parts.flatten(dim, dim + 2))
            outputs.append(shard.get_submodule(module)(x, *call))
            columns = [shard.get_submodule(name).weight for name in segment.column]
            grads = torch.autograd.grad(outputs[-1].sum(), columns)  # every projection has one, though of no units
            assert [one.shape for one in grads] == [one.shape for one in columns]
            begin += units
        torch.testing.assert_close(sum(outputs), wanted, rtol=1e-12, atol=1e-12)
