"""Segments of models that Colossal-AI's ShardFormer shards: what is found, and that it moves soundly."""

import pytest
import torch.distributed as dist
from helpers.hosts import DEPTH, HEADS, HIDDEN, MLP, Host, build, compute
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import assert_any_owner_computes_the_same
from helpers.segments import convert_and_find

from zeroresize.conversion import balanced_layers
from zeroresize.layers.unit_dropout import KeyedDropout, UnitDropout

pytestmark = [pytest.mark.usefixtures("colossalai_module"), pytest.mark.slow]

HEAD = HIDDEN // HEADS
#: Kind of model → (what a unit of attention is, how many, its rows in the parts of each layer).
ATTENTION = {
    "ViT": ("heads", HEADS, [(HEAD,)] * 4),
    "Bert": ("heads", HEADS, [(HEAD,)] * 4),
    "Llama": ("heads", HEADS, [(HEAD,)] * 4),
    "GPT2": ("heads", HEADS, [(HEAD,) * 3, (HEAD,)]),
}


def sharded(kind, group, fused_by_jit=False, **changes):
    from colossalai.shardformer import ShardConfig, ShardFormer

    Host(group)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank(group)]
    # Without a group of one rank, as Booster gives it, LLaMA gathers what it never split.
    config = ShardConfig(
        tensor_parallel_process_group=group, sequence_parallel_process_group=alone, enable_jit_fused=fused_by_jit
    )
    model, _ = ShardFormer(config).optimize(build(kind, **changes))
    return model, *convert_and_find(model, group)


@on_ranks(2, [(kind,) for kind in ATTENTION], timeout_s=120)
def test_any_owner_computes_the_same(rank, group, kind):
    """And every layer is in a segment of heads or of neurons."""

    model, segments, reasons = sharded(kind, group)
    layers = balanced_layers(model)
    assert reasons == {} and sorted(name for one in segments for name in one.layers) == sorted(layers)
    assert len(segments) == 2 * DEPTH
    name_of_units, num_units, rows = ATTENTION[kind]
    for attention, mlp in zip(segments[::2], segments[1::2], strict=True):
        weights = [one for one in attention.tensors if one.attribute == "weight"]
        assert attention.kind == name_of_units and sum(attention.counts) == num_units
        assert [one.rows for one in weights] == rows
        assert mlp.kind == "neurons" and len(mlp.owned.owners) == MLP
        assert {one.rows for one in mlp.tensors} == {(1,)}
        for segment in (attention, mlp):
            *columns, row = [one for one in segment.tensors if one.attribute == "weight"]
            transposed = kind == "GPT2"
            assert {one.dim for one in columns} == {int(transposed)} and row.dim == 1 - transposed
            assert all(one.dim == 0 for one in segment.tensors if one.attribute == "bias")
    assert_any_owner_computes_the_same(model, segments, compute(kind), group)
    model, segments, _ = sharded(kind, group, attention="eager")
    assert_any_owner_computes_the_same(model, segments, compute(kind), group)


@on_ranks(2)
def test_dropout_of_parallel_inputs_is_keyed_by_the_unit(rank, group):
    model, segments, _ = sharded("Bert", group, attention="eager", attention_probs_dropout_prob=0.3)
    names = {type(layer.attention.self.dropout).__name__ for layer in model.encoder.layer}
    assert names == {"DropoutForParallelInput"}
    KeyedDropout(model, segments, seed=3)

    def from_the_first_call(model):
        for layer in model.encoder.layer:
            assert isinstance(layer.attention.self.dropout, UnitDropout)
            layer.attention.self.dropout.num_calls = 0
        return compute("Bert")(model)

    assert_any_owner_computes_the_same(model, segments, from_the_first_call, group)
