"""Heads of transformers' attention move where they are computed alike, whatever functions a user puts in its place."""

import functools

import pytest
import torch
from helpers.hosts import DEPTH, build, compute, split
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import results
from helpers.processes import in_first_rank

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.integrations import known_modules
from zeroresize.layers.segments import owned_segments
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.resharding.agreement import CannotMoveError
from zeroresize.resharding.units.moving_units import move_units

pytestmark = pytest.mark.slow

BY_NUMBERS = "computed with numbers: "


def alibi(module, query, key, value, attention_mask, **options):
    """Sound as long as a rank holds these heads: each of them has another slope."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    slopes = torch.arange(1.0, query.shape[1] + 1.0, dtype=query.dtype).view(-1, 1, 1)
    distance = torch.arange(key.shape[2], dtype=query.dtype)
    options["is_causal"] = False
    return sdpa_attention_forward(module, query, key, value, -slopes * distance, **options)


def alibi_in_training(module, *operands, **options):
    """Not in evaluation."""
    return (alibi if module.training else scaled)(module, *operands, **options)


def alibi_with_gradients(module, *operands, **options):
    """Not where nothing is learned."""
    return (alibi if torch.is_grad_enabled() else scaled)(module, *operands, **options)


class NormOfGradients(torch.autograd.Function):
    """Divides gradients by their norm over all heads that the rank holds."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx / dx.norm()


def norm_of_gradients(module, query, *operands, **options):
    """All heads alike, but for gradients."""
    return scaled(module, NormOfGradients.apply(query), *operands, **options)


def scaled(module, query, key, value, attention_mask, **options):
    """All heads alike."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query.tanh(), key, value, attention_mask, **options)


@pytest.fixture
def attention_functions(monkeypatch):
    """transformers' table of them; what a test puts there is forgotten again."""
    from transformers.modeling_utils import AttentionInterface

    functions = dict(AttentionInterface._global_mapping)
    monkeypatch.setattr(AttentionInterface, "_global_mapping", functions)
    functions |= {"alibi": alibi, "scaled": scaled, "alibi in training": alibi_in_training}
    functions |= {"alibi with gradients": alibi_with_gradients, "norm of gradients": norm_of_gradients}
    return functions


def attention_of(model, group):
    """The segments of heads, and why a layer stays even."""
    zr.convert(model, process_group=group)
    layers = balanced_layers(model)
    reasons = [layer.stays_even for layer in layers.values() if layer.stays_even is not None]
    return [segment for segment in owned_segments(layers) if segment.kind != "neurons"], next(iter(reasons), None)


@on_ranks(2, [("ViT",), ("Llama",), ("Gemma2",), ("Granite",), ("Glm4",), ("GPT2",)])
@in_first_rank
def test_a_function_that_was_registered_is_tried_by_numbers(rank, group, kind, *, attention_functions):
    of_learning = [(name, True) for name in ("alibi with gradients", "norm of gradients")]
    for name, mode in (("alibi", True), ("alibi", False), ("alibi in training", False), *of_learning, ("scaled", True)):
        model = split(build(kind), group).train(mode)
        model.config._attn_implementation = name
        segments, reason = attention_of(model, group)
        assert len(segments) == (DEPTH if name == "scaled" else 0), reason
        assert name == "scaled" or BY_NUMBERS in reason


def norm_of_all_heads(x, *options):
    """In place of one of each head of x [B, T, heads, features], or of x in another order."""
    return x * torch.rsqrt(x.pow(2).mean((1, 2, 3), keepdim=True) + 1.0)


@on_ranks(2)
@in_first_rank
def test_heads_of_a_class_of_another_forward_do_not_move(rank, group, *, monkeypatch):
    """What another version may do between the layers; nothing about the module's class says so."""
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.glm4 import modeling_glm4
    from transformers.models.llama4 import modeling_llama4

    segments, reason = attention_of(split(build("Llama4Text"), group), group)
    assert len(segments) == DEPTH and all(each.min_units == each.owned.slices for each in segments), reason
    rotate, repeat = modeling_glm4.apply_rotary_pos_emb, modeling_gemma2.repeat_kv

    def rotate_other_heads(q, k, *rotations):
        return rotate(q.roll(1, dims=1), k, *rotations)

    monkeypatch.setattr(modeling_glm4, "apply_rotary_pos_emb", rotate_other_heads)
    monkeypatch.setattr(modeling_gemma2, "repeat_kv", lambda states, times: repeat(states, times).roll(1, dims=1))
    monkeypatch.setattr(modeling_llama4.Llama4TextL2Norm, "forward", lambda self, x: norm_of_all_heads(x))
    known = known_modules._adapters_by_name
    as_llama = known["transformers.models.llama.modeling_llama.LlamaAttention"]
    monkeypatch.setitem(known, "transformers.models.olmo2.modeling_olmo2.Olmo2Attention", as_llama)
    for kind, attention in (("Glm4", "sdpa"), ("Gemma2", "eager"), ("Llama4Text", "sdpa"), ("Olmo2", "sdpa")):
        segments, reason = attention_of(split(build(kind, attention), group), group)
        assert segments == [] and BY_NUMBERS in reason, kind


@on_ranks(2)
@in_first_rank
def test_flash_attention_moves_heads_if_it_is_that_of_transformers(rank, group, *, attention_functions):
    for function, num_segments in ((None, DEPTH), (alibi, 0)):
        if function is not None:
            attention_functions["flash_attention_2"] = function
        model = split(build("Llama"), group)
        model.config._attn_implementation = "flash_attention_2"
        segments, reason = attention_of(model, group)
        assert len(segments) == num_segments and model.config._attn_implementation == "flash_attention_2"
        assert {segment.min_units for segment in segments} <= {1}
    assert "'flash_attention_2' is not that of transformers" in reason


@on_ranks(2)
def test_heads_do_not_move_any_more_once_the_function_has_changed(rank, group, *, attention_functions):
    model = split(build("Llama"), group)
    segments, _ = attention_of(model, group)
    assert len(segments) == DEPTH
    num_units = len(segments[0].owned.owners)
    uneven = {segments[0].name: OwnershipMap.home(num_units, 2).with_counts([0, num_units])}
    move = functools.partial(move_units, segments, process_group=group, optimizer=None, model=model)
    home = {segments[0].name: segments[0].owned}
    move(uneven)
    model.config._attn_implementation = "alibi"
    move(home)  # which is always sound
    before = results(model, segments, compute("Llama"), group)
    if rank == 1:  # only one of them knows
        model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError if rank == 0 else CannotMoveError, match=rf"{BY_NUMBERS}|ranks \[0\]"):
        move(uneven)
    model.config._attn_implementation = "alibi"
    assert all(one.owned.is_home for one in segments)
    after = results(model, segments, compute("Llama"), group)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
