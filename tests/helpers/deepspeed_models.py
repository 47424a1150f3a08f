"""Small LLaMAs that DeepSpeed's AutoTP divides and trains on CPUs, beside the undivided ones."""

import os
import sys

import torch
import transformers
from torch import nn

from zeroresize.comm.collectives import group_size
from zeroresize.conversion import balanced_layers

VOCABULARY = 64
OPTIONS = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}


def llama(kind=transformers.LlamaConfig, **config):
    """An undivided model, alike on all ranks."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(kind(**sizes | config))


def as_deepspeed_rank(rank):
    """Let DeepSpeed take this process for a rank of a launcher's, on a CPU."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    import deepspeed  # noqa: F401

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else a compiler is asked for


def engine_of(model, rank, *, stage=0, num_shards=2, optimizer=None, micro_batches=2, **config):
    """DeepSpeed's engine of a model that AutoTP has divided."""
    as_deepspeed_rank(rank)
    import deepspeed

    given = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.5,
        "tensor_parallel": {"autotp_size": num_shards},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), **OPTIONS)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=given | config)[0]


def words(number):
    """A micro-batch."""
    return torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(number))


def update(engine, step, replica=0, num_replicas=1, backward=None):
    """One update by micro-batches of a replica; returns their losses."""
    backward = backward or engine.backward
    losses = []
    for number in range(engine.gradient_accumulation_steps()):
        batch = words((step * engine.gradient_accumulation_steps() + number) * num_replicas + replica)
        loss = engine(input_ids=batch, labels=batch).loss
        backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def undivided_run(model, steps, num_replicas=1, micro_batches=2):
    """Losses, by step, and weights of the undivided model in the same training."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), **OPTIONS), []
    for step in range(steps):
        for number in range(micro_batches * num_replicas):
            batch = words(step * micro_batches * num_replicas + number)
            loss = model(input_ids=batch, labels=batch).loss
            (loss / micro_batches / num_replicas).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.named_parameters())


def part_at_home(name, weight, model, rank):
    """What a rank holds at home of an undivided model's weight, or bias."""
    path, _, attribute = name.rpartition(".")
    layer: nn.Module = balanced_layers(model).get(path) or model.get_submodule(path)
    sizes, is_row = getattr(layer, "_partition_sizes", None), type(layer).__name__.endswith("Allreduce")
    if sizes is None or (attribute == "bias" and is_row):
        return weight
    return weight.split(sizes, int(is_row))[rank % group_size(layer.mp_group)]
