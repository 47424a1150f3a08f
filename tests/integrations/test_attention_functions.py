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
    functions["alibi"], functions["scaled"] = alibi, scaled
    return functions


def attention_of(model, group):
    """The segments of heads, and why a layer stays even."""
    zr.convert(model, process_group=group)
    layers = balanced_layers(model)
    reasons = [layer.stays_even for layer in layers.values() if layer.stays_even is not None]
    return [segment for segment in owned_segments(layers) if segment.kind != "neurons"], next(iter(reasons), None)


@on_ranks(2, [("ViT",), ("Llama",), ("GPT2",)])
@in_first_rank
def test_a_function_that_was_registered_is_tried_by_numbers(rank, group, kind, *, attention_functions):
    for name in ("alibi", "scaled"):
        model = split(build(kind), group)
        model.config._attn_implementation = name
        segments, reason = attention_of(model, group)
        assert len(segments) == (DEPTH if name == "scaled" else 0), reason
        assert name == "scaled" or BY_NUMBERS in reason


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
