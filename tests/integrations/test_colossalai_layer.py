"""Colossal-AI's layers, swapped one by one: bit for bit what they were, and which stay as they are."""

import pytest
import torch
import torch.distributed as dist
from helpers.hosts import Host, small_vit
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import plan_keeping
from helpers.processes import caught_log_lines
from torch import nn

from zeroresize import convert
from zeroresize.conversion import balanced_layers

pytestmark = pytest.mark.usefixtures("colossalai_module")


def native(host, kind, num_inputs, num_outputs, bias=True, **options):
    """One of Colossal-AI's layers, the same at every call."""
    from colossalai.shardformer import layer
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    is_gpt2 = kind.startswith("GPT2")
    whole = Conv1D(num_outputs, num_inputs) if is_gpt2 else nn.Linear(num_inputs, num_outputs, bias=bias)
    if "Fused" in kind and not (is_gpt2 and kind.endswith("Row")):
        num_split = num_outputs if kind.endswith("Col") else num_inputs
        num_parts = 2 if num_split % 4 == 0 else 3
        options["split_sizes"] = [num_split // num_parts] * num_parts
    made = getattr(layer, kind).from_native_module(whole, process_group=host.group, **options)
    if made.bias is not None:  # Conv1D's are zero
        nn.init.normal_(made.bias)
    return made


#: Colossal-AI's layers, and how they are made.
LAYERS = [
    ("Linear1D_Col", {}),
    ("Linear1D_Col", {"bias": False}),
    ("Linear1D_Col", {"skip_bias_add": True}),
    ("Linear1D_Row", {}),
    ("Linear1D_Row", {"bias": False}),
    ("Linear1D_Row", {"skip_bias_add": True}),
    ("Linear1D_Row", {"parallel_input": False}),
    ("FusedLinear1D_Col", {}),
    ("FusedLinear1D_Col", {"skip_bias_add": True}),
    ("FusedLinear1D_Row", {}),
    ("FusedLinear1D_Row", {"bias": False}),
    ("GPT2FusedLinearConv1D_Col", {}),
    ("GPT2FusedLinearConv1D_Col", {"skip_bias_add": True}),
    ("GPT2FusedLinearConv1D_Row", {}),
    ("GPT2FusedLinearConv1D_Row", {"skip_bias_add": True}),
    ("GPT2FusedLinearConv1D_Row", {"parallel_input": False}),
    *(
        (f"{kind}_{end}", {"seq_parallel_mode": "split_gather"})
        for kind in ("Linear1D", "FusedLinear1D", "GPT2FusedLinearConv1D")
        for end in ("Col", "Row")
    ),
]


@on_ranks(2, LAYERS)
def test_a_swapped_layer_is_bitwise_colossalais(rank, group, kind, options):
    def results(layer, rank, kind, options):
        splits_x = kind.endswith("Row") and options.get("parallel_input", True)
        differs = splits_x or "seq_parallel_mode" in options
        generator = torch.Generator().manual_seed(rank if differs else 5)
        x = torch.randn(2, 4, 5, 6 if splits_x else 12, generator=generator).requires_grad_()
        outputs = layer(x)
        y, bias = outputs if isinstance(outputs, tuple) else (outputs, None)
        y.backward(torch.randn(y.shape, generator=generator))
        return {
            "returns a tuple": isinstance(outputs, tuple),
            "returns its bias": bias is not None and bias is layer.bias,
            "tensors": [y, x.grad, *(parameter.grad for parameter in layer.parameters())],
        }

    host = Host(group)
    original, other = (native(host, kind, 12, 18, **options) for _ in range(2))
    swapped = nn.Sequential(other)
    convert(swapped, process_group=group)
    assert type(swapped[0]).__name__ == f"Balanced{kind}"

    expected, actual = (results(layer, rank, kind, options) for layer in (original, swapped[0]))
    pairs = list(zip(expected.pop("tensors"), actual.pop("tensors"), strict=True))
    assert actual == expected
    assert expected["returns a tuple"] == expected["returns its bias"] == ("skip_bias_add" in options)
    for tensor, counterpart in pairs:
        assert counterpart is None if tensor is None else torch.equal(tensor, counterpart)


@on_ranks(2)
def test_layers_that_cannot_be_balanced_stay_exactly_as_they_were(rank, group):
    host = Host(group)
    alone = [dist.new_group([0]), dist.new_group([1])][rank]

    def made(kind, process_group=group, **options):
        return kind.from_native_module(nn.Linear(8, 8), process_group=process_group, **options)

    column, row = host.Linear1D_Col, host.Linear1D_Row

    class DerivedCol(column):
        """Somebody's own layer."""

    derived = made(column)
    derived.__class__ = DerivedCol
    cases = {
        "gathered": (made(column, gather_output=True), "gather_output=True"),
        "sequence_ring": (made(row, seq_parallel_mode="ring"), "seq_parallel_mode='ring'"),
        "fp8": (made(column, fp8_communication=True), "fp8_communication=True"),
        "zbv": (made(row, use_zbv=True), "use_zbv=True"),
        "chunked": (made(row, stream_chunk_num=2), "stream_chunk_num > 1"),
        "derived": (derived, "DerivedCol is a subclass with a forward of its own"),
        "normed": (torch.nn.utils.weight_norm(made(column)), "its weight is no parameter: something makes it anew"),
        "elsewhere": (made(column, alone), "it belongs to another process group"),
    }
    model = nn.ModuleDict({"plain": made(column), **{name: layer for name, (layer, _) in cases.items()}})
    before = {name: (type(layer), dict(vars(layer))) for name, (layer, _) in cases.items()}

    with caught_log_lines() as lines:
        convert(model, process_group=group)

    assert list(balanced_layers(model)) == ["plain"]
    for name, (layer, reason) in cases.items():
        assert model[name] is layer and (type(layer), vars(layer)) == before[name]
        (line,) = [line for line in lines if f"layer {name} " in line]
        assert reason in line


@on_ranks(2, [("GPT2FusedLinearConv1D_Col",), ("GPT2FusedLinearConv1D_Row",)])
def test_columns_of_a_transposed_weight_are_its_rows(rank, group, kind):
    """Pruned ones take no part: as if the weight were zero there."""

    model = nn.Sequential(native(Host(group), kind, 12, 18)).double()
    convert(model, process_group=group)
    layer = model[0]
    kept = list(range(1, layer.num_columns, 2))
    mask = torch.zeros(layer.num_columns, 1, dtype=torch.float64)
    mask[kept] = 1.0
    x = torch.randn(4, 5, layer.num_columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for plan in (None, plan_keeping(kept, layer.num_columns)):
        layer.zero_grad()
        own_x = x.clone().requires_grad_()
        weight = layer.weight.detach().clone()
        if plan is None:
            layer.weight.data *= mask
        layer.plan = plan
        y = layer(own_x)
        y.square().sum().backward()
        layer.weight.data = weight
        results.append([y.detach(), own_x.grad, layer.weight.grad * mask, layer.bias.grad])
        if plan is not None:
            assert torch.equal(layer.weight.grad, layer.weight.grad * mask)
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_lora_is_refused_by_the_host_and_by_peft(rank, group):
    peft = pytest.importorskip("peft")
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin

    host, config = Host(group), peft.LoraConfig(r=2, target_modules=["query"])
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32"))
    with pytest.raises(AssertionError):
        booster.enable_lora(small_vit(), lora_config=config)
    boosted = host.boost(small_vit())
    with pytest.raises(ValueError, match=r"Linear1D_Col.* is not supported"):
        peft.get_peft_model(boosted.model.unwrap(), config)
