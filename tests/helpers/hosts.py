"""Hosts in a rank: Colossal-AI on a CPU, and tiny models of Hugging Face."""

from __future__ import annotations

import functools
import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import zeroresize as zr
from zeroresize import BalanceConfig

OFF = BalanceConfig(mode="off")
HIDDEN, DEPTH, LABELS = 32, 2, 6


class Host:
    """What a rank uses of Colossal-AI; models that are compared live side by side in the same rank."""

    def __init__(self, group):
        from colossalai.shardformer import layer

        from zeroresize.integrations import colossalai as integration

        warnings.simplefilter("ignore")
        integration.prepare_accelerator()
        self.group, self.integration = group, integration
        self.Linear1D_Col, self.Linear1D_Row = layer.Linear1D_Col, layer.Linear1D_Row

    def shard(self, model, balanced_from_the_start=False):
        """By ShardFormer alone."""
        from colossalai.shardformer import ShardConfig, ShardFormer

        config = ShardConfig(tensor_parallel_process_group=self.group)
        policy = self.balanced_vit_policy() if balanced_from_the_start else None
        return ShardFormer(config).optimize(model, policy)[0]

    def boost(self, model, balanced_from_the_start=False, precision="fp32"):
        """By Booster; returns what is needed to train."""
        from colossalai.booster import Booster
        from colossalai.booster.plugin import HybridParallelPlugin

        policy = self.balanced_vit_policy() if balanced_from_the_start else None
        plugin = HybridParallelPlugin(tp_size=2, pp_size=1, precision=precision, custom_policy=policy)
        booster = Booster(plugin=plugin)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, *_ = booster.boost(model, optimizer)
        return SimpleNamespace(model=model, optimizer=optimizer, booster=booster, group=plugin.tp_group)

    def balanced_vit_policy(self):
        from colossalai.shardformer.policies.vit import ViTForImageClassificationPolicy

        return self.integration.balanced_policy(ViTForImageClassificationPolicy)()


def small_vit(**changes):
    """The same on every rank and at every call."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 8,
        "patch_size": 4,
        "num_labels": LABELS,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return ViTForImageClassification(ViTConfig(**{**config, **changes})).train()


def batch(step=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randn(4, 3, 8, 8, generator=generator, dtype=dtype)
    return images, torch.randint(LABELS, (4,), generator=generator)


HEADS, KV_HEADS, MLP, VOCABULARY = 4, 2, 48, 24
_SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": MLP,
}
_IMAGES = {"image_size": 8, "patch_size": 4}
_WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "attention_dropout": 0.0}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_COLUMN = (
    *(f"attention.{place}{kind}" for place in ("attention.", "self.") for kind in ("query", "key", "value")),
    "intermediate.dense",
    *(f"{place}.{kind}_proj" for place in ("self_attn", "attention") for kind in "qkv"),
    "mlp.fc1",
    "gate_proj",
    "up_proj",
    "c_attn",
    "c_fc",
)
_ROW = ("output.dense", "o_proj", "down_proj", "c_proj", "mlp.fc2")
#: Kind of model → (its attributes in a config, whether it reads pictures).
KINDS = {
    "ViT": ({**_SIZES, **_IMAGES, **_NO_DROPOUT}, True),
    "DeiT": ({**_SIZES, **_IMAGES, **_NO_DROPOUT}, True),
    "Bert": ({**_SIZES, **_NO_DROPOUT, "vocab_size": VOCABULARY}, False),
    "Roberta": ({**_SIZES, **_NO_DROPOUT, "vocab_size": VOCABULARY, "pad_token_id": VOCABULARY - 1}, False),
    "Llama": ({**_SIZES, **_WORDS, "num_key_value_heads": KV_HEADS}, False),
    "Mistral": ({**_SIZES, **_WORDS, "num_key_value_heads": HEADS}, False),
    "Qwen2": ({**_SIZES, **_WORDS, "num_key_value_heads": KV_HEADS}, False),
    "Gemma2": (
        {
            **{**_SIZES, **_WORDS, "num_key_value_heads": KV_HEADS},
            **{"head_dim": HIDDEN // HEADS, "query_pre_attn_scalar": 6, "attn_logit_softcapping": 0.5},
            "sliding_window": 4,
        },
        False,
    ),
    "Granite": ({**_SIZES, **_WORDS, "num_key_value_heads": KV_HEADS, "attention_multiplier": 0.7}, False),
    "Glm4": (
        {
            **{**_SIZES, **_WORDS, "num_key_value_heads": KV_HEADS},
            **{"head_dim": HIDDEN // HEADS, "attention_bias": True, "pad_token_id": 0},
        },
        False,
    ),
    "GPT2": (
        {
            "n_embd": HIDDEN,
            "n_layer": DEPTH,
            "n_head": HEADS,
            "n_inner": MLP,
            "vocab_size": VOCABULARY,
            "n_positions": 16,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
        False,
    ),
}
#: The same of those that not every test of these can take.
_FURTHER = {
    "Llama4Text": (
        {
            **{**_SIZES, **_WORDS, "num_key_value_heads": KV_HEADS, "head_dim": HIDDEN // HEADS},
            **{"intermediate_size_mlp": MLP, "moe_layers": []},
        },
        False,
    ),
    "Olmo2": ({**_SIZES, **_WORDS, "num_key_value_heads": KV_HEADS, "pad_token_id": 0}, False),
}


def build(kind, attention="sdpa", **changes):
    """The same on every rank and at every call, in float64."""
    import transformers

    settings, _ = (KINDS | _FURTHER)[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**settings, **changes}, attn_implementation=attention)
    model = getattr(transformers, f"{kind}Model")(config).double().train()
    for parameter in model.parameters():  # biases that are not zero, and attention that is not uniform
        nn.init.normal_(parameter, std=0.2)
    return model


def last_hidden_state(kind, model):
    generator = torch.Generator().manual_seed(1)
    if KINDS[kind][1]:
        return model(torch.randn(3, 3, 8, 8, generator=generator, dtype=torch.float64)).last_hidden_state
    words = torch.randint(VOCABULARY - 1, (3, 7), generator=generator)
    return model(input_ids=words, use_cache=None if kind in ("Bert", "Roberta") else False)[0]


def compute(kind):
    return functools.partial(last_hidden_state, kind)


def split(model, group):
    """Its attention and feed-forward layers over the group, in place."""
    num_ranks = dist.get_world_size(group)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Conv1D":
            module = _as_linear(module)
        if not isinstance(module, nn.Linear) or not name.endswith((*_COLUMN, *_ROW)):
            continue
        made_by = zr.ColumnParallelLinear if name.endswith(_COLUMN) else zr.RowParallelLinear
        parent, _, leaf = name.rpartition(".")
        parts = {"c_attn": 3, "gate_up_proj": 2}.get(leaf, 1)
        layer = made_by.from_linear(module, process_group=group, parts=parts)
        setattr(model.get_submodule(parent), leaf, layer)
    for module in model.modules():
        for count in ("num_attention_heads", "all_head_size", "num_heads", "split_size", "embed_dim"):
            if isinstance(getattr(module, count, None), int):
                setattr(module, count, getattr(module, count) // num_ranks)
    return model


def _as_linear(conv):
    num_inputs, num_outputs = conv.weight.shape
    linear = nn.Linear(num_inputs, num_outputs, dtype=conv.weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    return linear
