"""Colossal-AI 0.5.0 as it is: where it computes otherwise than the undivided model, and where it does not."""

import torch
from colossalai_cases import batch, loss, setting, whole
from helpers.hosts import DEPTH, Host
from plain_cases import ACTIVATIONS, DRAWS, GRADIENTS, LATER, NORM, PARTIAL
from planted_faults import Setting, cases_of

CASES, colossalai = cases_of()
BLOCKS = range(DEPTH)


def boosted(kind, group, *, sequence=None, has_norm=False, the_batch=None, **changes):
    """By its Booster, whose optimizer ends the backward, and clips."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin

    Host(group)
    if not torch.cuda.is_available():
        torch.cuda.set_device = lambda device: None
    options = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": sequence} if sequence else {}
    if sequence == "all_to_all":
        options |= {"sp_size": 2}
    plugin = HybridParallelPlugin(
        tp_size=1 if sequence == "all_to_all" else 2, pp_size=1, precision="fp32", max_norm=1.0, **options
    )
    model = whole(kind, **changes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)

    optimizer.plugin = plugin  # its groups end with it

    def clip(model):
        pairs = [(item, item.grad) for item in model.parameters() if item.grad is not None]
        return optimizer._compute_grad_norm(pairs)

    kwargs = {"optimizer": optimizer, **({"clip": clip} if has_norm else {})}
    return Setting(model, the_batch or batch(), loss, kwargs)


def _named(*places):
    return tuple(place.format(number) for place in places for number in BLOCKS)


@colossalai(
    (DRAWS, ACTIVATIONS),
    _named("bert.encoder.layer.{}.output.dropout", "bert.encoder.layer.{}.attention.output.dropout"),
)
def bert_drops_replicated_activations_by_rank(rank, group):
    return setting("Bert", group, hidden_dropout_prob=0.2)


@colossalai((DRAWS, ACTIVATIONS), _named("transformer.h.{}.attn.resid_dropout", "transformer.h.{}.mlp.dropout"))
def gpt2_drops_replicated_activations_by_rank(rank, group):
    return setting("GPT2", group, the_batch=batch(has_mask=True), attention="eager", resid_pdrop=0.2)


@colossalai((LATER,), ("", *_named("transformer.h.{}.attn")))
def gpt2_for_language_sees_later_tokens(rank, group):
    return setting("GPT2", group, the_batch=batch(has_mask=True))


@colossalai((LATER,), ("", *_named("model.layers.{}.self_attn")))
def llama_sees_later_tokens_under_split_gather(rank, group):
    return boosted("Llama", group, sequence="split_gather", the_batch=batch(has_mask=True))


@colossalai(
    (PARTIAL, GRADIENTS),
    _named("bert.encoder.layer.{}.output.dense", "bert.encoder.layer.{}.attention.output.dense"),
)
def bert_never_sums_biases_of_divided_sequences(rank, group):
    return boosted("Bert", group, sequence="split_gather", the_batch=batch(has_mask=True))


@colossalai((NORM,), ("", *_named("transformer.h.{}")))
def gpt2_counts_its_fused_weights_for_less(rank, group):
    return boosted("GPT2", group, has_norm=True, the_batch=batch(has_mask=True), attention="eager")


@colossalai()
def llama_is_clipped_by_the_undivided_norm(rank, group):
    return boosted("Llama", group, has_norm=True)


@colossalai()
def llama_under_split_gather_with_a_padded_row(rank, group):
    inputs = batch(has_mask=True)
    inputs["attention_mask"][0, -1] = 0
    return boosted("Llama", group, sequence="split_gather", the_batch=inputs)
