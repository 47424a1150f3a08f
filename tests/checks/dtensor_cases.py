"""Cases of a decoder that torch's styles divide into DTensors."""

import torch
import torch.distributed as dist
from decoders import batch, loss, split_by_styles, whole
from plain_cases import (
    GRADIENTS,
    MULTIPLIED,
    PARTIAL,
)
from planted_faults import Setting, cases_of
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

CASES, dtensor = cases_of()


def setting(kwargs=None, the_loss=loss, the_batch=None, style=None, **options):
    model = split_by_styles(whole(**options), **(style or {}))
    return Setting(model, the_batch or batch(), the_loss, kwargs or {})


@dtensor(("packed weight is cut across its parts",), ("blocks.0.mlp.gate_up", "blocks.1.mlp.gate_up"))
def gate_and_up_in_one_weight(rank, group):
    """Of torch's own style, which knows no parts."""
    return setting(is_packed=True)


@dtensor((PARTIAL, GRADIENTS), ("blocks.0.scale", "blocks.1.scale"))
def scale_of_divided_sequences_that_nobody_sums(rank, group):
    """A plain parameter between layers of sequence parallelism."""
    return setting(has_scale=True, style={"is_sequence": True})


@dtensor((PARTIAL, GRADIENTS), tuple(f"blocks.{n}.attention.{item}_norm" for n in (0, 1) for item in "qk"))
def plain_norms_of_divided_heads(rank, group):
    return setting(has_norms=True)


def _against_random(loss_function):
    """Of logits that are divided by words, against a target of their shape, which is divided alike."""

    def goal(logits):
        generator = torch.Generator().manual_seed(5)
        return torch.rand(logits.shape, generator=generator, dtype=logits.dtype)

    def sharded_loss(model, words_and_targets):
        logits = model(words_and_targets[0])
        local_goal = goal(logits).chunk(2, dim=-1)[dist.get_rank()].contiguous()
        return loss_function(logits, DTensor.from_local(local_goal, logits.device_mesh, logits.placements))

    return {
        "the_loss": sharded_loss,
        "style": {"head": {"output_layouts": Shard(-1), "use_local_output": False}},
    }


EVERYWHERE = ("", "embed", "blocks", "norm", "head")


@dtensor((MULTIPLIED,), EVERYWHERE)
def mean_of_squares_of_sharded_logits(rank, group):
    return setting(**_against_random(functional.mse_loss))


# Sound twins: the same models as they are.


@dtensor()
def decoder_of_dtensors(rank, group):
    return setting(has_scale=True, kwargs={"reference": lambda: whole(has_scale=True)})


@dtensor()
def sequence_parallelism(rank, group):
    return setting(style={"is_sequence": True})


@dtensor()
def tied_again_after_the_split(rank, group):
    made = setting(is_tied=True)
    made.model.head.weight = made.model.embed.weight
    return made
