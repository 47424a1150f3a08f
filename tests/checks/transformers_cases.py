"""Cases of decoders that transformers has split by its plan while it loaded them; versions 4.51 and 5."""

import shutil
import tempfile

import torch.distributed as dist
from helpers.transformers_models import batch, split_by_plan, whole_decoder
from plain_cases import ACTIVATIONS, GRADIENTS, PARTIAL, SUMMED
from planted_faults import Setting, cases_of
from torch import nn

CASES, transformers = cases_of()


def loss(model, inputs):
    return model(**inputs).loss


def whole(kind, is_tied=False):
    model = whole_decoder(kind)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    if is_tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    return model.train()


def setting(kind, rank, kwargs=None, the_batch=None, **options):
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)  # version 5 saves on rank 0 alone
    whole(kind, **options).save_pretrained(folders[0], is_main_process=rank == 0)
    dist.barrier()
    model = split_by_plan(folders[0], rank).train()
    dist.barrier()
    shutil.rmtree(folders[0], ignore_errors=True)
    return Setting(model, the_batch or batch(0), loss, kwargs or {})


@transformers((SUMMED, ACTIVATIONS), ("model.layers.1.self_attn.o_proj",))
def row_layer_that_gives_its_own_product(rank, group):
    made = setting("llama", rank)
    layer = made.model.model.layers[1].self_attn.o_proj
    layer.forward = lambda x: nn.functional.linear(x, layer.weight.to_local())
    layer._forward_hooks.clear()
    layer._forward_pre_hooks.clear()
    return made


@transformers((PARTIAL, GRADIENTS), tuple(f"model.layers.{n}.self_attn.{item}_norm" for n in (0, 1) for item in "qk"))
def norms_of_heads_that_nobody_sums(rank, group):
    """Version 4.51 does not, by its plan of Qwen3; of version 5 the hooks are taken away."""
    made = setting("qwen3", rank)
    for layer in made.model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.__dict__.pop("forward", None)
    return made


# Sound twins: the same models as they are.


@transformers()
def llama_by_its_plan(rank, group):
    return setting("llama", rank, kwargs={"reference": lambda: whole("llama")})


@transformers()
def qwen3_whose_norms_are_summed_before_they_accumulate(rank, group):
    made = setting("qwen3", rank)

    def sum_of_ranks(gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    for layer in made.model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.__dict__.pop("forward", None)
            norm.weight.register_hook(sum_of_ranks)
    return made
