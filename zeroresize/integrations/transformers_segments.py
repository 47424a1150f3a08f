"""The attention and feed-forward modules of Hugging Face's transformers, as ShardFormer or a user shards them.

Read against transformers 4.51 and 5.24 and Colossal-AI 0.5: each adapter sets the attributes by which a forward counts
heads, its own and the one that ShardFormer puts in its place.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zeroresize.integrations.attention_functions import (
    fewest_heads,
    is_forward_of_class,
    why_foreign,
    why_unknown_attention,
)
from zeroresize.integrations.changed_modules import remembered_by, why_hooked
from zeroresize.integrations.segment_registry import SegmentAdapter, StaysEven, register_by_name, require_elementwise
from zeroresize.layers.segment import Segment

#: The dimension of attention probabilities [B, heads, T, T] that holds heads.
_HEADS = 1
#: Forwards in place of a module's own that count heads as the module's own does.
_READ_FORWARDS = "colossalai.shardformer.modeling."
#: The forward of a style that calls the module's, and has its gradients summed over the ranks.
_SUMMING_FORWARD = (
    "transformers.distributed.tensor_parallel.ReplicatedWithGradAllReduce.install_forward.<locals>.tp_forward"
)


def _vit_attention(module: Any) -> Segment:
    if hasattr(module, "q_proj"):  # from transformers 5 on
        return _llama_attention(module)
    return _self_attention(module.attention, module.output)


def _bert_attention(module: Any) -> Segment:
    return _self_attention(module.self, module.output)


def _self_attention(attention: Any, output: Any) -> Segment:
    _require_known(attention)
    _require_known(output)
    _require_known_function(attention)
    head_size = attention.attention_head_size

    def set_heads(heads: list[int]) -> None:
        attention.num_attention_heads = len(heads)
        attention.all_head_size = len(heads) * head_size

    columns = [attention.query, attention.key, attention.value]
    return Segment(
        columns,
        output.dense,
        unit_size=head_size,
        on_change=set_heads,
        min_units=fewest_heads(attention),
        kind="heads",
        dropouts=[(_dropout(attention.dropout), _HEADS)] if hasattr(attention, "dropout") else (),
        has_other_dropout=getattr(attention, "dropout_prob", 0.0) > 0.0,  # as of a function
    )


def _vit_layer(module: Any) -> Segment | None:
    """From transformers 5 on its feed-forward layers are in a module of their own, which is traced."""
    return None if hasattr(module, "mlp") else _encoder_layer(module)


def _encoder_layer(module: Any) -> Segment:
    _require_known(module.intermediate)
    _require_known(module.output)
    require_elementwise(module.intermediate.intermediate_act_fn)
    return Segment([module.intermediate.dense], module.output.dense, min_units=0, kind="neurons")


def _llama_attention(module: Any) -> Segment:
    _require_known_function(module)
    groups, head_size = getattr(module, "num_key_value_groups", 1), module.head_dim

    def set_heads(units: list[int]) -> None:
        counts = {
            "num_heads": len(units) * groups,
            "num_key_value_heads": len(units),
            "hidden_size": len(units) * groups * head_size,
        }
        for name, count in counts.items():
            if hasattr(module, name):  # older versions, and ShardFormer
                setattr(module, name, count)

    return Segment(
        [module.q_proj, module.k_proj, module.v_proj],
        module.o_proj,
        unit_size=groups * head_size,
        on_change=set_heads,
        min_units=fewest_heads(module),
        kind="heads" if groups == 1 else "KV groups",
        has_other_dropout=module.attention_dropout > 0.0,
    )


def _attention_with_norms_of_heads(module: Any) -> Segment:
    """As LLaMA's, with norms of each head of q and k: one weight for all heads, so its gradient is a sum over ranks."""
    for norm in (module.q_norm, module.k_norm):
        _require_class(norm)
        _require_no_hooks(norm)
        if _sums_gradients(norm):
            continue
        _require_own_forward(norm)
        if any(parameter.requires_grad for parameter in norm.parameters()):
            raise StaysEven(
                f"the weight of {type(norm).__name__} is of all heads, and nothing sums its gradient over the ranks "
                "(transformers 5 does)"
            )
    return _llama_attention(module)


def _sums_gradients(norm: nn.Module) -> bool:
    """Whether a style of transformers has replaced its forward by one that only sees to its gradients."""
    forward = vars(norm).get("forward")
    if not inspect.isfunction(forward) or f"{forward.__module__}.{forward.__qualname__}" != _SUMMING_FORWARD:
        return False
    original = getattr(remembered_by(forward).get("original_forward"), "__func__", None)
    return original is type(norm).forward and is_forward_of_class(norm)


def _gpt2_attention(module: Any) -> Segment:
    if module.is_cross_attention:
        raise StaysEven("its queries and its keys are of two inputs")
    _require_known_function(module)
    head_size = module.head_dim

    def set_heads(heads: list[int]) -> None:
        module.num_heads = len(heads)
        module.embed_dim = len(heads) * head_size
        # Tensor.split cannot make three parts of nothing by their size.
        module.split_size = len(heads) * head_size or (0, 0, 0)

    return Segment(
        [module.c_attn],
        module.c_proj,
        unit_size=head_size,
        parts=3,
        on_change=set_heads,
        min_units=fewest_heads(module),
        kind="heads",
        dropouts=[(_dropout(module.attn_dropout), _HEADS)],
        has_other_dropout=module.attn_dropout.p > 0.0 and module.config._attn_implementation != "eager",
    )


def _gpt2_mlp(module: Any) -> Segment:
    require_elementwise(module.act)
    return Segment([module.c_fc], module.c_proj, min_units=0, kind="neurons")


def _dropout(module: nn.Module) -> nn.Module:
    require_elementwise(module)
    _require_no_hooks(module)
    return module


def _require_known(module: nn.Module) -> None:
    _require_class(module)
    _require_own_forward(module)
    _require_no_hooks(module)


def _require_class(module: nn.Module) -> None:
    kind = type(module)
    if f"{kind.__module__}.{kind.__qualname__}" not in _PARTS:
        raise StaysEven(f"{kind.__name__} is no module that is known")


def _require_no_hooks(module: nn.Module) -> None:
    if (changed := why_hooked(module)) is not None:
        raise StaysEven(f"{type(module).__name__} {changed}")


def _require_own_forward(module: nn.Module) -> None:
    kind = type(module)
    for name in vars(module):
        if callable(getattr(kind, name, None)) and not (name == "forward" and _is_read(module)):
            raise StaysEven(f"the {name} of {kind.__name__} was replaced")
    if "forward" not in vars(module) and not is_forward_of_class(module):
        raise StaysEven(f"the forward of the class {kind.__name__} was replaced")


def _is_read(module: nn.Module) -> bool:
    """Whether the module has a forward of Colossal-AI in place of its class's."""
    forward = vars(module).get("forward")
    function = getattr(forward, "__func__", forward)
    return str(getattr(function, "__globals__", {}).get("__name__")).startswith(_READ_FORWARDS)


def _require_known_function(attention: nn.Module) -> None:
    """Those of Colossal-AI do not look the function up."""
    asked = why_foreign if _is_read(attention) else why_unknown_attention
    if (unknown := asked(attention)) is not None:
        raise StaysEven(unknown)


def _checked(adapter: Callable[[Any], Segment | None]) -> SegmentAdapter:
    """For a library that may change: a module that is not as it was read stays even, or does not move any more."""

    def as_read(module: Any) -> Segment | None:
        _require_own_forward(module)
        try:
            return adapter(module)
        except AttributeError as error:
            raise StaysEven(f"{type(module).__name__} is not as transformers 4.51 and 5.24 have it: {error}") from error

    def checked(module: Any) -> Segment | Sequence[Segment]:
        reading = as_read(module)
        if reading is None:
            return ()

        def why_even() -> str | None:
            try:
                now = as_read(module)
            except StaysEven as error:
                return str(error)
            assert now is not None
            if now.has_other_dropout and not reading.has_other_dropout:
                return f"the dropout of {type(module).__name__} was turned on after convert"
            if now.min_units > reading.min_units:
                return (
                    f"the attention of {type(module).__name__} was switched after convert to one that cannot compute "
                    "with no heads: convert with it"
                )
            return None

        return dataclasses.replace(reading, why_even=why_even)

    return checked


def _names(model: str, *classes: str) -> list[str]:
    return [f"transformers.models.{model}.modeling_{model}.{name}" for name in classes]


_PARTS = {
    *_names("qwen3", "Qwen3RMSNorm"),
    *_names("vit", "ViTSelfAttention", "ViTSelfOutput", "ViTIntermediate", "ViTOutput"),
    *_names("deit", "DeiTSelfAttention", "DeiTSelfOutput", "DeiTIntermediate", "DeiTOutput"),
    *(
        f"transformers.models.{model}.modeling_{model}.{prefix}{name}"
        for model, prefix in (("bert", "Bert"), ("roberta", "Roberta"))
        for name in ("SelfAttention", "SdpaSelfAttention", "SelfOutput", "Intermediate", "Output")
    ),
}
for _classes, _adapter in (
    ([*_names("vit", "ViTAttention"), *_names("deit", "DeiTAttention")], _vit_attention),
    ([*_names("bert", "BertAttention"), *_names("roberta", "RobertaAttention")], _bert_attention),
    ([*_names("vit", "ViTLayer"), *_names("deit", "DeiTLayer")], _vit_layer),
    (
        [
            *_names("bert", "BertLayer"),
            *_names("roberta", "RobertaLayer"),
        ],
        _encoder_layer,
    ),
    (
        [
            *_names("llama", "LlamaAttention"),
            *_names("mistral", "MistralAttention"),
            *_names("qwen2", "Qwen2Attention"),
            *_names("gemma", "GemmaAttention"),
        ],
        _llama_attention,
    ),
    (_names("qwen3", "Qwen3Attention"), _attention_with_norms_of_heads),
    (_names("gpt2", "GPT2Attention"), _gpt2_attention),
    (_names("gpt2", "GPT2MLP"), _gpt2_mlp),
):
    register_by_name(_classes, _checked(_adapter))
