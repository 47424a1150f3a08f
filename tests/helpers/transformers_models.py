"""Small models of transformers, split over ranks by its own plans or by torch's styles; versions 4.51 and 5."""

import os
from contextlib import contextmanager

import torch
import transformers
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

IS_5 = int(transformers.__version__.split(".")[0]) >= 5
WORDS = 64
_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
#: The prefix of class names, and what their configuration is given.
DECODERS = {
    "llama": ("Llama", _DECODER),
    "qwen2": ("Qwen2", _DECODER),
    "qwen3": ("Qwen3", {**_DECODER, "head_dim": 4}),
    "mistral": ("Mistral", {**_DECODER, "head_dim": 4}),
    "gemma": ("Gemma", {**_DECODER, "head_dim": 4}),
}
_GEMMA = {**_DECODER, "head_dim": 4, "query_pre_attn_scalar": 6, "sliding_window": 4, "use_cache": False}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
_LINEAR = {f"linear_{kind}": 4 for kind in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")}
#: The same of what only their plan's test needs: what sets each apart is in both of its layers, or in one.
FAMILIES = {
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 0.05, "attn_implementation": "eager"}),
    "gemma3": ("Gemma3Text", {**_GEMMA, "sliding_window_pattern": 2}),
    "granite": ("Granite", {**_DECODER, "attention_multiplier": 2.0, "residual_multiplier": 0.7}),
    "glm4": ("Glm4", {**_DECODER, "head_dim": 4, "attention_bias": True, "pad_token_id": 0, "eos_token_id": 1}),
    "mixtral": ("Mixtral", {**_DECODER, "num_local_experts": 4, "sliding_window": 4}),
    "qwen3_moe": ("Qwen3Moe", {**_DECODER, **_EXPERTS, "head_dim": 4, "num_experts": 4, "mlp_only_layers": [0]}),
    "olmo2": ("Olmo2", {**_DECODER, "pad_token_id": 0, "eos_token_id": 1}),
    "phi3": ("Phi3", {**_DECODER, "pad_token_id": 0, "eos_token_id": 1}),
}
if IS_5:
    _SLIDING = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    _IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    FAMILIES |= {
        "smollm3": ("SmolLM3", {**_DECODER, **_SLIDING, **_IDS, "no_rope_layers": [1, 0]}),
        "qwen3_next": (
            "Qwen3Next",
            {
                **{**_DECODER, **_EXPERTS, **_LINEAR, "head_dim": 4, "num_experts": 4},
                **{"shared_expert_intermediate_size": 16, "layer_types": ["full_attention"] * 2},
            },
        ),
        "llama4": (
            "Llama4Text",
            {
                **{**_DECODER, "head_dim": 4, "num_hidden_layers": 4, "intermediate_size_mlp": 64, "moe_layers": [2]},
                **{"num_local_experts": 2, "floor_scale": 2, "attn_scale": 0.5, "attention_chunk_size": 4},
            },
        ),
        "deepseek_v3": (
            "DeepseekV3",
            {
                **{
                    **_DECODER,
                    "num_key_value_heads": 8,
                    "moe_intermediate_size": 16,
                    "n_routed_experts": 4,
                    "n_group": 2,
                },
                **{"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 8},
                **{"q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
            },
        ),
        "gpt_oss": ("GptOss", {**_DECODER, **_IDS, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2}),
    }


def whole_decoder(kind):
    prefix, settings = (DECODERS | FAMILIES)[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**settings)
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config).double()
    return with_eager_experts(model)


def with_eager_experts(model):
    """The grouped products that version 5 prefers are not of float64."""
    model.config._experts_implementation = "eager"
    return model


def whole_encoder(kind):
    torch.manual_seed(0)
    if kind == "bert":
        config = transformers.BertConfig(
            **_ENCODER, vocab_size=WORDS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        return transformers.BertForMaskedLM(config).double()
    config = transformers.ViTConfig(
        **_ENCODER, image_size=16, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.ViTForImageClassification(config).double()


@contextmanager
def as_rank(rank, num_ranks):
    """As a launcher tells: transformers reads its rank from the environment."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in environment.items()})
    yield


def split_by_plan(folder, rank, num_ranks=2, plan="auto", **options):
    """The model in ``folder`` as ``from_pretrained`` splits it by its own plan, or with these rules besides."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    with as_rank(rank, num_ranks):
        if not IS_5:
            return load(folder, tp_plan="auto", torch_dtype=torch.float64, **options)
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(tp_plan=plan, tp_size=num_ranks)
        return with_eager_experts(load(folder, distributed_config=config, dtype=torch.float64, **options))


def split_by_styles(model, mesh):
    """A model from a configuration, split by torch's ``parallelize_module``; attention counts this rank's heads."""
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "query", "key", "value", "intermediate.dense")
    rows = ("o_proj", "down_proj", "attention.output.dense", "output.dense")
    inside = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and "layer" in name)
    plan = {}
    for name in inside:
        if name.endswith(columns) or name.endswith(("fc1",)):
            plan[name] = ColwiseParallel()
        elif name.endswith(rows) or name.endswith(("fc2",)):
            plan[name] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    for module in model.modules():
        if hasattr(module, "num_attention_heads") and not hasattr(module, "config_class") and hasattr(module, "query"):
            module.num_attention_heads //= mesh.size()
            module.all_head_size //= mesh.size()
    return model


def batch(seed, kind="decoder"):
    generator = torch.Generator().manual_seed(seed)
    if kind == "vit":
        pictures = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixel_values": pictures, "labels": torch.randint(2, (2,), generator=generator)}
    words = torch.randint(WORDS, (2, 8), generator=generator)
    return {"input_ids": words, "labels": words}


def train(model, optimizer, num_steps, clip, kind="decoder", after=lambda step: None, micro_batches=1):
    """Losses and norms of some steps, each of a batch of two in one or two micro-batches."""
    values = []
    for step in range(num_steps):
        whole = batch(step, kind)
        for part in zip(*(each.chunk(micro_batches) for each in whole.values()), strict=True):
            loss = model(**dict(zip(whole, part, strict=True))).loss / micro_batches
            loss.backward()
            values.append(loss.item())
        values.append(clip(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return values
