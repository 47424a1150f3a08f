"""Cases of models that Colossal-AI's ShardFormer, or its Booster, has split."""

import copy

import torch
import torch.distributed as dist
from helpers.hosts import KINDS, Host
from plain_cases import (
    ACTIVATIONS,
    BACKWARDS,
    DRAWS,
    GRADIENTS,
    LATER,
    NORM,
    PARTIAL,
    SUMMED,
    Sum,
)
from planted_faults import Setting, cases_of, change
from torch import nn
from torch.nn import functional

CASES, colossalai = cases_of("Colossal-AI")
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


def setting(kind, group, kwargs=None, seed=0, the_batch=None, parts=None, **changes):
    model = shard(whole(kind, **changes), group)
    return Setting(
        model, the_batch or batch(), loss, whole(kind, **changes), kwargs or {}, parts=parts or {}, seed=seed
    )


def see_all_tokens(attention):
    """Of LLaMA, by SDPA."""
    kind = type(attention)

    def forward(self, *args, **kwargs):
        return kind.forward(self, *args, **{**kwargs, "attention_mask": None, "is_causal": False})

    change(attention, forward=forward)


@colossalai((SUMMED, ACTIVATIONS), ("model.layers.1.mlp.down_proj",))
def llama_row_layer_without_its_sum(rank, group):
    made = setting("Llama", group)
    change(made.model.model.layers[1].mlp.down_proj, forward=lambda self, x: functional.linear(x, self.weight))
    return made


@colossalai((SUMMED,), ("bert.encoder.layer.0.output.dense",))
def bert_bias_added_before_the_sum(rank, group):
    made = setting("Bert", group)
    dense = made.model.bert.encoder.layer[0].output.dense
    change(dense, forward=lambda self, x: Sum.apply(functional.linear(x, self.weight, self.bias), group))
    return made


@colossalai(
    (PARTIAL, GRADIENTS),
    ("model.layers.0.self_attn.v_proj", "model.layers.0.input_layernorm", "model.embed_tokens"),
)
def llama_column_layer_whose_dx_nobody_sums(rank, group):
    made = setting("Llama", group)
    value = made.model.model.layers[0].self_attn.v_proj
    change(value, forward=lambda self, x: functional.linear(x, self.weight, self.bias))
    return made


@colossalai((DRAWS, ACTIVATIONS), ("bert.embeddings.dropout",))
def bert_dropout_of_embeddings_by_rank(rank, group):
    """Colossal-AI's dropout of replicated inputs, with the generator of that of parallel ones."""
    made = setting("Bert", group, hidden_dropout_prob=0.2)
    quiet_rows(made)
    dropout = made.model.bert.embeddings.dropout
    generator = torch.Generator().manual_seed(3 + rank)

    def forward(self, x):
        return x * (torch.rand(x.shape, generator=generator) >= self.p) / (1 - self.p)

    change(dropout, forward=forward)
    return made


def quiet_rows(made):
    """BERT's dropout behind row-parallel layers is a fault of its host: switched off."""
    for model in (made.model, made.whole):
        for layer in model.bert.encoder.layer:
            layer.output.dropout.p = layer.attention.output.dropout.p = 0.0
    # What is compared draws alike: Colossal-AI's dropout has a generator of its own.
    made.whole.bert.embeddings.dropout = copy.deepcopy(made.model.bert.embeddings.dropout)


@colossalai(("inputs differ between ranks",), ("", "bert.embeddings"))
def bert_with_other_batches_on_the_ranks(rank, group):
    return setting("Bert", group, the_batch=batch(rank))


@colossalai(("parameters differ between ranks",), ("model.norm.weight",))
def llama_norm_that_is_seeded_otherwise(rank, group):
    made = setting("Llama", group)
    with torch.no_grad():
        made.model.model.norm.weight += 0.1 * rank
    return made


@colossalai((LATER,), ("model.layers.0.self_attn", "model.layers.1.self_attn", ""))
def llama_whose_mask_is_dropped(rank, group):
    made = setting("Llama", group)
    for layer in made.model.model.layers:
        see_all_tokens(layer.self_attn)
    return made


@colossalai((BACKWARDS,), ("model.layers.0.input_layernorm.weight",), "two backwards")
def llama_hook_that_sums_what_is_accumulated(rank, group):
    """Its mean, which leaves one backward right."""
    made = setting("Llama", group)

    def hook(parameter):
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad.mul_(0.5 if parameter.grad is not None else 1.0)
        parameter.grad.add_(parameter.grad * getattr(parameter, "num_backwards", 0))
        parameter.num_backwards = getattr(parameter, "num_backwards", 0) + 1

    made.model.model.layers[0].input_layernorm.weight.register_post_accumulate_grad_hook(hook)
    return made


@colossalai((NORM,), ("",), "norm")
def llama_clipping_by_the_norm_of_shards(rank, group):
    def clip(model):
        return nn.utils.clip_grad_norm_(model.parameters(), 1e9)

    return setting("Llama", group, kwargs={"clip": clip})


# Sound twins: the same models as they are.


@colossalai()
def llama_with_grouped_keys(rank, group):
    return setting("Llama", group, kwargs={"reference": lambda: whole("Llama")})


@colossalai()
def qwen2_as_it_is(rank, group):
    return setting("Qwen2", group)


@colossalai()
def bert_without_dropout(rank, group):
    return setting("Bert", group)


@colossalai()
def bert_with_dropout_of_replicated_embeddings(rank, group):
    made = setting("Bert", group, hidden_dropout_prob=0.2)
    quiet_rows(made)
    return made


@colossalai()
def gpt2_whose_packed_weights_are_cut_by_part(rank, group):
    parts = {f"transformer.h.{n}.attn.c_attn.{kind}": 3 for n in (0, 1) for kind in ("weight", "bias")}
    return setting("GPT2", group, the_batch=batch(has_mask=True), attention="eager", parts=parts)


@colossalai()
def llama_whose_head_is_tied(rank, group):
    return setting("Llama", group, tie_word_embeddings=True)


@colossalai()
def bert_with_masked_labels(rank, group):
    inputs = batch()
    inputs["labels"][inputs["labels"] % 3 == 0] = -100
    return setting("Bert", group, the_batch=inputs)
