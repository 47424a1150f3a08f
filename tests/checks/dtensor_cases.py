"""Cases of a decoder that torch's styles divide into DTensors."""

import torch
import torch.distributed as dist
from decoders import batch, loss, masked_loss, split_by_styles, whole
from plain_cases import (
    ACTIVATIONS,
    GRADIENTS,
    MULTIPLIED,
    NORM,
    PARTIAL,
    SUMMED,
)
from planted_faults import Setting, cases_of
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn import functional

from zeroresize.layers.local_parts import local_of

CASES, dtensor = cases_of()


def setting(kwargs=None, the_loss=loss, the_batch=None, style=None, **options):
    model = split_by_styles(whole(**options), **(style or {}))
    return Setting(model, the_batch or batch(), the_loss, kwargs or {})


class RowwiseOfOneRank(RowwiseParallel):
    """Gives this rank's product for the sum."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        return outputs.to_local()


@dtensor((SUMMED, ACTIVATIONS), ("blocks.0.mlp.down", "blocks.0.attention.out"))
def style_of_rows_that_does_not_sum(rank, group):
    made = setting()
    made.model.blocks[0] = split_by_styles(whole(), row=RowwiseOfOneRank).blocks[0]
    return made


@dtensor(("packed weight is cut across its parts",), ("blocks.0.mlp.gate_up", "blocks.1.mlp.gate_up"))
def gate_and_up_in_one_weight(rank, group):
    """Of torch's own style, which knows no parts."""
    return setting(is_packed=True)


@dtensor(("tie is broken",), ("head.weight", "embed.weight", "head", "embed"))
def head_and_embedding_that_styles_untie(rank, group):
    return setting(is_tied=True)


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


@dtensor(("parameters differ between ranks",), ("blocks.0.norm1.weight",))
def replicated_norm_that_differs(rank, group):
    """A DTensor says Replicate of what is not alike."""
    made = setting()
    with torch.no_grad():
        local_of(made.model.blocks[0].norm1.weight).add_(0.1 * rank)
    return made


@dtensor((NORM,), ("",))
def clipping_by_the_norm_of_local_parts(rank, group):
    def clip(model):
        return nn.utils.get_total_norm([local_of(item.grad) for item in model.parameters() if item.grad is not None])

    return setting(kwargs={"clip": clip})


# Sound twins: the same models as they are.


@dtensor()
def decoder_of_dtensors(rank, group):
    return setting(has_scale=True, kwargs={"reference": lambda: whole(has_scale=True)})


@dtensor()
def sequence_parallelism(rank, group):
    return setting(style={"is_sequence": True})


@dtensor()
def mean_of_squares_of_whole_logits(rank, group):
    def squares(model, words_and_targets):
        return functional.mse_loss(model(words_and_targets[0]), torch.zeros((), dtype=torch.float64).expand(3, 6, 20))

    return setting(the_loss=squares)


@dtensor()
def mean_of_squares_by_elementary_operations_of_sharded_logits(rank, group):
    return setting(**_against_random(lambda x, y: ((x - y) ** 2).mean()))


@dtensor()
def dropout_and_grouped_heads(rank, group):
    return setting(dropout=0.2, kv_heads=2)


@dtensor()
def tied_again_after_the_split(rank, group):
    made = setting(is_tied=True)
    made.model.head.weight = made.model.embed.weight
    return made


@dtensor()
def clipping_of_dtensors_by_torch(rank, group):
    return setting(kwargs={"clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5)})


@dtensor()
def labels_that_are_masked_of_dtensors(rank, group):
    return setting(the_loss=masked_loss, style={"is_sequence": True}, kv_heads=2)
