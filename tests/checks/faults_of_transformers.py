"""transformers 5 and peft as they are: what they compute otherwise than the undivided model."""

import torch
from helpers.transformers_models import batch
from plain_cases import BACKWARDS
from planted_faults import Setting, cases_of
from transformers_cases import loss, setting

CASES, transformers = cases_of()


@transformers((BACKWARDS,), tuple(f"model.layers.{n}.self_attn.{item}_norm" for n in (0, 1) for item in "qk"))
def qwen3_sums_accumulated_gradients_of_norms_again(rank, group):
    return setting("qwen3", rank)


@transformers(
    ("parameter is never read", "differs from the reference"),
    ("base_model.model.lm_head", "base_model.model.model.layers.1.mlp.down_proj"),
)
def what_peft_saves_is_never_read(rank, group):
    """A copy of a split layer, which computes with the original's weight."""
    made = setting("llama", rank)
    return Setting(with_saved(made.model), batch(0), loss)


@transformers(("parameters differ between ranks",), ("model.norm.weight",))
def what_is_new_is_drawn_by_each_rank(rank, group):
    """As a head that a checkpoint does not hold is, where ranks are not seeded alike."""
    made = setting("llama", rank)
    torch.manual_seed(rank)
    with torch.no_grad():
        made.model.model.norm.weight.normal_()
    return made


def with_saved(model):
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["model.layers.1.mlp.down_proj"])
    return peft.get_peft_model(model, config)
