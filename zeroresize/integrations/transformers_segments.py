"""The attention and feed-forward modules of Hugging Face's transformers, as ShardFormer or a user shards them.

Read against transformers 4.51 and 5.24 and Colossal-AI 0.5: each adapter sets the attributes by which a forward counts
heads, its own and the one that ShardFormer puts in its place.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.integrations.changed_modules import remembered_by, why_changed, why_hooked
from zeroresize.integrations.known_modules import SegmentAdapter, StaysEven, is_elementwise_module, register_by_name
from zeroresize.integrations.lora import base_of, of_bases
from zeroresize.integrations.unit_proof import Between, MixesUnitsError
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segment import OnChange, Segment
from zeroresize.plan.ownership import units_by_block

logger = logging.getLogger(__name__)

#: The dimension of attention probabilities [B, heads, T, T] that holds heads.
_HEADS = 1
_FLASH = ("flash_attention_2", "flash_attention_3")
#: Modules that are given rotations as complex numbers.
_ROTATED_BY_COMPLEX = ("Llama4TextAttention",)
#: Forwards in place of a module's own that count heads as the module's own does. They need what is not known here.
_READ_FORWARDS = "colossalai.shardformer.modeling."
#: The forward of a style that calls the module's, and has its gradients summed over the ranks.
_SUMMING_FORWARD = (
    "transformers.distributed.tensor_parallel.ReplicatedWithGradAllReduce.install_forward.<locals>.tp_forward"
)


def _bert_attention(module: Any) -> Segment:
    """Of BERT and RoBERTa, and of ViT and DeiT, where these are not as LLaMA's, as from transformers 5 on."""
    if hasattr(module, "q_proj"):
        return _llama_attention(module)
    attention, output = module.self if hasattr(module, "self") else module.attention, module.output
    head_size = attention.attention_head_size

    def set_heads(heads: list[int]) -> None:
        attention.num_attention_heads = len(heads)
        attention.all_head_size = len(heads) * head_size

    return Segment(
        [attention.query],
        output.dense,
        shared=[attention.key, attention.value],
        unit_size=head_size,
        on_change=set_heads,
        min_units=_fewest_heads(attention),
        kind="heads",
        dropouts=[(_dropout(attention.dropout), _HEADS)] if hasattr(attention, "dropout") else (),
        has_other_dropout=getattr(attention, "dropout_prob", 0.0) > 0.0,  # as of a function
    )


def _encoder_layer(module: Any) -> Segment | None:
    if hasattr(module, "mlp"):  # from transformers 5 on ViT's are in a module of their own, which is traced
        return None
    _require_elementwise(module.intermediate.intermediate_act_fn)
    return Segment([module.intermediate.dense], module.output.dense, min_units=0, kind="neurons")


def _llama_attention(module: Any) -> Segment:
    groups, head_size = getattr(module, "num_key_value_groups", 1), module.head_dim
    o_proj, k_proj = base_of(module.o_proj), base_of(module.k_proj)
    if isinstance(o_proj, BalancedLinear) and isinstance(k_proj, BalancedLinear):
        groups, left = divmod(o_proj.whole_size, k_proj.whole_size)  # what the module says follows heads
        if left:
            raise StaysEven("its queries' features are no multiple of its keys'")

    def set_heads(units: list[int]) -> None:
        of_each = units_by_block(units, groups)[1] or groups
        counts = {
            "num_heads": len(units),
            "num_key_value_heads": len(units) // of_each,
            "num_key_value_groups": of_each,
            "hidden_size": len(units) * head_size,
        }
        for name, count in counts.items():
            if hasattr(module, name):  # older versions, and ShardFormer
                setattr(module, name, count)

    return Segment(
        [module.q_proj],
        module.o_proj,
        unit_size=head_size,
        shared=[module.k_proj, module.v_proj],
        group_size=groups,
        on_change=set_heads,
        min_units=_fewest_heads(module),
        kind="heads",
        has_other_dropout=module.attention_dropout > 0.0,
    )


def _attention_with_norms_of_heads(module: Any) -> Segment:
    """As LLaMA's, with norms of each head of q and k: one weight for all heads, so its gradient is a sum over ranks."""
    for norm in (module.q_norm, module.k_norm):
        if not _sums_gradients(norm) and any(parameter.requires_grad for parameter in norm.parameters()):
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
    return getattr(remembered_by(forward).get("original_forward"), "__func__", None) is type(norm).forward


def _gpt2_attention(module: Any) -> Segment:
    if module.is_cross_attention:
        raise StaysEven("its queries and its keys are of two inputs")
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
        min_units=_fewest_heads(module),
        kind="heads",
        dropouts=[(_dropout(module.attn_dropout), _HEADS)],
        has_other_dropout=module.attn_dropout.p > 0.0 and module.config._attn_implementation != "eager",
    )


def _gpt2_mlp(module: Any) -> Segment:
    _require_elementwise(module.act)
    return Segment([module.c_fc], module.c_proj, min_units=0, kind="neurons")


def _dropout(module: nn.Module) -> nn.Module:
    _require_elementwise(module)
    return module


def _require_elementwise(activation: Any) -> None:
    """Check that ``activation``, which a configuration gave to a module, is known to be element-wise."""
    name = type(activation).__name__ if isinstance(activation, nn.Module) else repr(activation)
    if not is_elementwise_module(activation):
        raise StaysEven(
            f"{name} between the layers is not known to be element-wise: if it is, tell by "
            "zeroresize.integrations.register_elementwise"
        )
    if isinstance(activation, nn.Module) and (changed := why_changed(activation)) is not None:
        raise StaysEven(f"{name} between the layers {changed}")


def _is_read(module: nn.Module) -> bool:
    """Whether the module has a forward of Colossal-AI in place of its class's."""
    forward = vars(module).get("forward")
    function = getattr(forward, "__func__", forward)
    return str(getattr(function, "__module__", None)).startswith(_READ_FORWARDS)


def _fewest_heads(attention: Any) -> int:
    """How many heads a module needs on every rank: flash attention divides by their number."""
    return 0 if _implementation(attention) in ("eager", "sdpa", None) and not _is_read(attention) else 1


def _implementation(module: Any) -> str | None:
    """The name of the attention function that is looked up; None in classes that look none up."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _between(module: Any, segment: Segment, of_each: int = 1) -> Between:
    """What lies between its layers, of so many units of each group."""
    tell = partial(_in_groups, segment.on_change, of_each, segment.group_size)
    num_rows, call = of_each * segment.unit_size, partial(_call, module)
    return Between(module, _rows_of(segment, of_each), segment.row, num_rows, call, tell)


def _require_unmixed(module: Any, segment: Segment) -> None:
    """Check by numbers that the module treats units alike, whatever it calls."""
    size = segment.group_size
    of_single = partial(_in_groups, segment.on_change, size, size, apart=True)
    try:
        with _without_flash_attention(module):
            # A unit of each group, with rows of its own of k and v; whole groups; and these beside units so apart.
            _between(module, segment).require_unmixed()
            if size > 1:
                _between(module, segment, size).require_unmixed()
                _between(module, segment, size).require_unmixed((of_single, dict.fromkeys(segment.shared, size)))
    except Exception as error:  # whatever its functions make of the numbers
        raise StaysEven(f"{type(module).__name__}, computed with numbers: {type(error).__name__}: {error}") from error


def _is_divisible(module: Any, segment: Segment) -> bool:
    """Whether heads may be computed on several ranks, by each for some of the tokens, as numbers prove."""
    try:
        if not segment.shared or segment.has_other_dropout or segment.dropouts or _is_read(module):
            raise MixesUnitsError("q, k and v are one layer, dropout is within, or its forward is not its class's")
        _between(module, segment).require_divisible(segment.shared)
    except Exception as error:
        logger.debug("the heads of a %s are owned whole: %s", type(module).__name__, error)
        return False
    return True


def _rows_of(segment: Segment, of_each: int) -> dict[Any, tuple[int, ...]]:
    """How many features of the column-parallel layers belong to so many units of a group."""
    row: Any = segment.row
    parts = segment.parts if isinstance(segment.parts, int) else 1
    num_units = row.whole_size // segment.unit_size
    columns, shared = list[Any](segment.column), list[Any](segment.shared)
    rows = {layer: (of_each * layer.whole_size // num_units // parts,) * parts for layer in columns}
    return rows | {layer: (layer.whole_size * segment.group_size // num_units,) for layer in shared}


def _in_groups(on_change: OnChange | None, of_each: int, size: int, groups: list[int], *, apart: bool = False) -> None:
    """Tell a module that it has so many units of each of these groups, or that so many are each of another group."""
    if on_change is not None:
        units = [size * group + number for group in groups for number in range(of_each)]
        on_change([size * unit for unit in units] if apart else units)


@contextmanager
def _without_flash_attention(module: Any) -> Iterator[None]:
    """Let eager attention take the place of transformers' flash attention, which is of half precision only."""
    name = _implementation(module)
    if name not in _FLASH:
        yield
        return
    function = vars(sys.modules[type(module).__module__])["ALL_ATTENTION_FUNCTIONS"][name]
    if not str(function.__globals__.get("__name__")).startswith("transformers."):
        raise StaysEven(f"the attention function {name!r} is not that of transformers")
    module.config._attn_implementation = "eager"
    try:
        yield
    finally:
        module.config._attn_implementation = name


def _call(module: Any, x: Tensor) -> None:
    """Run an attention, or feed-forward layers, on the replicated input [B, T, K]."""
    if hasattr(module, "intermediate"):
        module.output(module.intermediate(x), x)
        return
    parameters = inspect.signature(module.forward).parameters
    known: dict[str, Any] = {"hidden_states": x}
    if hasattr(module, "head_dim"):
        angles = torch.linspace(-1.0, 1.0, x.shape[1] * module.head_dim, dtype=x.dtype, device=x.device)
        angles = angles.view(1, x.shape[1], module.head_dim)
        known["position_embeddings"] = angles.cos(), angles.sin()
        if type(module).__name__ in _ROTATED_BY_COMPLEX:
            known["position_embeddings"] = torch.polar(torch.ones_like(angles), angles)[..., ::2]
        known["cache_position"] = torch.arange(x.shape[1], device=x.device)
    needed = [name for name, one in parameters.items() if one.default is one.empty and one.kind != one.VAR_KEYWORD]
    module(**{name: known.get(name) for name in (*needed, *(known.keys() & parameters.keys()))})


def _checked(adapter: Callable[[Any], Segment | None]) -> SegmentAdapter:
    """For a library that may change: a module that is not as it was read stays even, or does not move any more."""

    def as_read(module: Any) -> Segment | None:
        try:
            segment = adapter(module)
        except AttributeError as error:
            raise StaysEven(f"{type(module).__name__} is not as transformers 4.51 and 5.24 have it: {error}") from error
        if segment is None or not all(isinstance(base_of(layer), BalancedLinear) for layer in segment.layers):
            return segment
        segment = of_bases(segment)
        holders = [module.intermediate, module.output] if hasattr(module, "intermediate") else [module]
        parts = [part for holder in holders for part in holder.modules()]
        for part in parts:
            if not isinstance(part, BalancedLinear) and (hooked := why_hooked(part, is_whole=True)) is not None:
                raise StaysEven(f"{type(part).__name__} {hooked}")
        if not any(map(_is_read, parts)):
            _require_unmixed(module, segment)
            if segment.min_units == 0 and not _between(module, segment).computes_with_none():
                return dataclasses.replace(segment, min_units=1)
        return segment

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

        divisible = all(isinstance(each, BalancedLinear) for each in reading.layers) and _is_divisible(module, reading)
        return dataclasses.replace(reading, why_even=why_even, divisible=divisible)

    return checked


def _class_names(models: str, part: str) -> list[str]:
    """Qualified names of classes of models, each ``folder/Name``, or ``Name`` alone where the folder is called so."""
    pairs = [model.rpartition("/")[::2] for model in models.split()]
    return [f"transformers.models.{f or name.lower()}.modeling_{f or name.lower()}.{name}{part}" for f, name in pairs]


for _adapter, _classes in {
    _bert_attention: _class_names("ViT DeiT Bert Roberta", "Attention"),
    _encoder_layer: _class_names("ViT DeiT Bert Roberta", "Layer"),
    _llama_attention: _class_names(
        "Llama Mistral Mixtral Qwen2 Gemma Gemma2 Granite SmolLM3 Glm4 llama4/Llama4Text", "Attention"
    ),
    _attention_with_norms_of_heads: _class_names("Qwen3 qwen3_moe/Qwen3Moe qwen3_next/Qwen3Next Gemma3", "Attention"),
    _gpt2_attention: _class_names("GPT2", "Attention"),
    _gpt2_mlp: _class_names("GPT2", "MLP"),
}.items():
    register_by_name(_classes, _checked(_adapter))
