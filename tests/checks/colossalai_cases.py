"""Cases of models that Colossal-AI's ShardFormer, or its Booster, has split."""

import torch
import torch.distributed as dist
from helpers.hosts import KINDS, Host
from plain_cases import (
    ACTIVATIONS,
    SUMMED,
)
from planted_faults import Setting, cases_of, change
from torch import nn
from torch.nn import functional

CASES, colossalai = cases_of()
WORDS = 128  #: a multiple of what Colossal-AI pads to
HEADS_OF = {
    "Llama": "LlamaForCausalLM",
    "Bert": "BertForMaskedLM",
    "GPT2": "GPT2LMHeadModel",
    "Qwen2": "Qwen2ForCausalLM",
}


def whole(kind, attention="sdpa", **changes):
    import transformers

    torch.manual_seed(0)
    settings = {**KINDS[kind][0], "use_cache": False, "attn_implementation": attention, "vocab_size": WORDS, **changes}
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, HEADS_OF[kind])(config).double().train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def batch(seed=1, has_mask=False):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (2, 8), generator=generator)
    mask = {"attention_mask": torch.ones_like(words)} if has_mask else {}
    return {"input_ids": words, "labels": words.clone(), **mask}


def loss(model, inputs):
    return model(**inputs).loss


def shard(model, group):
    """By ShardFormer alone."""
    from colossalai.shardformer import ShardConfig, ShardFormer

    Host(group)
    if not torch.cuda.is_available():  # its GPT-2 for language names a device on its way
        torch.cuda.set_device = lambda device: None
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank(group)]
    # Without a group of one rank, as Booster gives it, LLaMA gathers what it never split.
    config = ShardConfig(
        tensor_parallel_process_group=group,
        sequence_parallel_process_group=alone,
    )
    return ShardFormer(config).optimize(model)[0]


def setting(kind, group, kwargs=None, the_batch=None, **changes):
    model = shard(whole(kind, **changes), group)
    return Setting(model, the_batch or batch(), loss, kwargs or {})


@colossalai((SUMMED, ACTIVATIONS), ("model.layers.1.mlp.down_proj",))
def llama_row_layer_without_its_sum(rank, group):
    made = setting("Llama", group)
    change(made.model.model.layers[1].mlp.down_proj, forward=lambda self, x: functional.linear(x, self.weight))
    return made


def quiet_rows(made):
    """BERT's dropout behind row-parallel layers is a fault of its host: switched off."""
    for layer in made.model.bert.encoder.layer:
        layer.output.dropout.p = layer.attention.output.dropout.p = 0.0


# Sound twins: the same models as they are.


@colossalai()
def llama_with_grouped_keys(rank, group):
    return setting("Llama", group, kwargs={"reference": lambda: whole("Llama")})


@colossalai()
def bert_with_dropout_of_replicated_embeddings(rank, group):
    made = setting("Bert", group, hidden_dropout_prob=0.2)
    quiet_rows(made)
    return made


@colossalai()
def gpt2_whose_packed_weights_are_cut_by_part(rank, group):
    return setting("GPT2", group, the_batch=batch(has_mask=True), attention="eager")
