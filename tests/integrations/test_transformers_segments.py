"""Segments of Hugging Face's models split by this package's own layers: what is found, and that it moves soundly."""

import pytest
from helpers.hosts import DEPTH, HEADS, HIDDEN, KINDS, KV_HEADS, MLP, build, compute, split
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import assert_any_owner_computes_the_same
from helpers.segments import convert_and_find

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.integrations.find_segments import find_segments

pytestmark = pytest.mark.slow

HEAD = HIDDEN // HEADS
GROUPS = HEADS // KV_HEADS
HEADS_OF = {
    **dict.fromkeys(
        ("ViT", "DeiT", "Bert", "Roberta", "Mistral", "Llama", "Qwen2", "Gemma2", "Granite", "Glm4"),
        ("heads", HEADS, [(HEAD,)] * 3, HEAD),
    ),
    "GPT2": ("heads", HEADS, [(HEAD,) * 3], HEAD),
}


@on_ranks(2, [(kind,) for kind in KINDS], timeout_s=120)
def test_every_layer_is_in_a_segment_of_heads_or_of_neurons_and_any_owner_computes_the_same(rank, group, kind):
    model = split(build(kind), group)
    segments, reasons = convert_and_find(model, group)
    layers = balanced_layers(model)
    assert reasons == {} and sorted(name for one in segments for name in one.layers) == sorted(layers)
    assert len(segments) == 2 * DEPTH
    name_of_units, num_units, rows_of_columns, rows_of_row = HEADS_OF[kind]
    for attention, mlp in zip(segments[::2], segments[1::2], strict=True):
        weights = [one for one in attention.tensors if one.attribute == "weight"]
        assert attention.kind == name_of_units and sum(attention.counts) == num_units
        assert [one.rows for one in weights] == [*rows_of_columns, (rows_of_row,)]
        assert mlp.kind == "neurons" and len(mlp.owned.owners) == MLP
        assert {tensor.rows for tensor in mlp.tensors} == ({(1, 1), (1,)} if kind == "Glm4" else {(1,)})
        for segment in (attention, mlp):
            *columns, row = segment.layers
            assert segment.name == row and not layers[row].is_column_parallel
            assert segment.min_units == 0 and segment.quantum == 1
            assert [one.dim for one in segment.tensors] == [0] * (len(segment.tensors) - 1) + [1]
            biases = [one.name for one in segment.tensors if one.attribute == "bias"]
            assert biases == [f"{name}.bias" for name in columns if layers[name].bias is not None]
    assert_any_owner_computes_the_same(model, segments, compute(kind), group)
    if kind in ("ViT", "Bert", "Llama", "GPT2", "Gemma2"):
        model = split(build(kind, "eager"), group)
        assert_any_owner_computes_the_same(model, convert_and_find(model, group)[0], compute(kind), group)


@on_ranks(2)
def test_a_layer_that_is_not_converted_keeps_its_segment_even(rank, group):
    model = split(build("ViT"), group)
    zr.convert(
        model, process_group=group, module_filter_fn=lambda layer, name: not name.endswith("0.attention.attention.key")
    )
    segments, reasons = find_segments(model, balanced_layers(model), 2)
    assert len(segments) == 3
    assert set(reasons) == {
        f"encoder.layer.0.attention.{layer}" for layer in ("attention.query", "attention.value", "output.dense")
    }
    assert all("attention.key, of the same segment, is not converted" in one for one in reasons.values())
