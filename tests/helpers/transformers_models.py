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


def whole_decoder(kind):
    prefix, settings = DECODERS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**settings)
    return getattr(transformers, f"{prefix}ForCausalLM")(config).double()


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


def split_by_plan(folder, rank, num_ranks=2):
    """The model in ``folder`` as ``from_pretrained`` splits it by its own plan."""
    with as_rank(rank, num_ranks):
        if not IS_5:
            return transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", torch_dtype=torch.float64)
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(tp_plan="auto", tp_size=num_ranks)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float64)


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


def train(model, optimizer, num_steps, clip, kind="decoder", after=lambda step: None):
    """Losses and norms of some steps."""
    values = []
    for step in range(num_steps):
        loss = model(**batch(step, kind)).loss
        loss.backward()
        norm = clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        after(step)
        values += [loss.item(), norm.item()]
    return values
