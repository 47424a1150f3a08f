"""Cases of a decoder that this package's own layers divide."""

import decoders
import torch
import torch.distributed as dist
from decoders import HEAD, batch, loss, split, whole
from planted_faults import Setting, cases_of, change
from torch import nn
from torch.distributed.nn import functional as dist_functional
from torch.nn import functional

from zeroresize.layers.local_parts import local_of

CASES, plain = cases_of()
SUMMED, PARTIAL = "sum is counted wrongly", "gradient is a partial sum"
ACTIVATIONS, DRAWS = "activations differ between ranks", "random draws differ between ranks"
GRADIENTS, MULTIPLIED = "gradients differ between ranks", "gradient is multiplied"
BACKWARDS, LATER, NORM = "backwards do not add up", "later tokens are seen", "clipping norm is not the undivided one"


class SumOfGradients(torch.autograd.Function):
    """x in forward; in backward its gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone()
        dist.all_reduce(dx, group=ctx.group)
        return dx, None


def setting(group, kwargs=None, the_loss=loss, the_batch=None, **options):
    model = split(whole(**options), group)
    return Setting(model, the_batch or batch(), the_loss, kwargs or {})


@plain((SUMMED, ACTIVATIONS), ("blocks.1.mlp.down",))
def row_product_that_nobody_sums(rank, group):
    made = setting(group)
    down = made.model.blocks[1].mlp.down
    change(down, forward=lambda self, x: functional.linear(x, self.weight, self.bias))
    return made


@plain((MULTIPLIED,), ("blocks.0.mlp", "blocks.0.attention", "blocks.0.norm", "embed"))
def sum_whose_backward_sums_again(rank, group):
    """The all-reduce of torch.distributed.nn sums gradients, too: those before it are the ranks' number too large."""
    made = setting(group)
    down = made.model.blocks[0].mlp.down

    def forward(self, x):
        return dist_functional.all_reduce(functional.linear(x, self.weight), group=group) + self.bias

    change(down, forward=forward)
    return made


@plain((PARTIAL, GRADIENTS), ("blocks.1.attention.v", "blocks.1.norm1", "blocks.0", "embed"))
def column_layer_whose_dx_nobody_sums(rank, group):
    made = setting(group)
    value = made.model.blocks[1].attention.v
    change(value, forward=lambda self, x: functional.linear(x, self.weight, self.bias))
    return made


@plain((PARTIAL, GRADIENTS), ("blocks.0.attention.k", "blocks.0.attention.v"))
def keys_and_values_replicated_beside_divided_queries(rank, group):
    made = setting(group)
    attention = made.model.blocks[0].attention
    original = whole().blocks[0].attention
    attention.k, attention.v = original.k, original.v

    def heads(self, x):
        q, k, v = self.q(x), *(layer(SumOfGradients.apply(x, group)) for layer in (self.k, self.v))
        return tuple(item.unflatten(-1, (-1, HEAD)) for item in (q, *(item.chunk(2, dim=-1)[rank] for item in (k, v))))

    change(attention, heads=heads)
    return made


@plain(("packed weight is cut across its parts",), ("blocks.0.mlp.gate_up", "blocks.1.mlp.gate_up"))
def gate_and_up_in_one_weight_that_is_cut_as_one(rank, group):
    from zeroresize import ColumnParallelLinear

    model = split(whole(is_packed=True), group)
    for block in model.blocks:
        packed = block.mlp.gate_up
        block.mlp.gate_up = ColumnParallelLinear(*reversed(packed.weight.shape), process_group=group).double()
        for name, parameter in packed.named_parameters():
            setattr(block.mlp.gate_up, name, nn.Parameter(parameter.detach().chunk(2)[rank].clone()))
    return Setting(model, batch(), loss)


@plain(("tie is broken",), ("head.weight", "embed.weight", "head", "embed"))
def head_whose_tie_to_the_embedding_is_broken(rank, group):
    made = setting(group, is_tied=True)
    made.model.head.weight = nn.Parameter(made.model.head.weight.detach().clone())
    return made


@plain((DRAWS, ACTIVATIONS), ("blocks.0.dropout",))
def dropout_that_draws_from_a_generator_of_each_rank(rank, group):
    made = setting(group, dropout=0.2)
    generator = torch.Generator().manual_seed(7 + rank)

    def forward(self, x):
        kept = torch.rand(x.shape, generator=generator) >= self.p
        return x * kept / (1 - self.p) if self.training else x

    change(made.model.blocks[0].dropout, forward=forward)
    return made


@plain(("inputs differ between ranks",), ("", "embed", "blocks.0"))
def other_batches_on_the_ranks(rank, group):
    return setting(group, the_batch=batch(rank))


@plain(("parameter is never read",), ("blocks.1.scale",))
def scale_that_nothing_reads(rank, group):
    made = setting(group, has_scale=True)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))

    change(made.model.blocks[1], forward=forward)
    return made


@plain((BACKWARDS,), tuple(f"blocks.{n}.attention.{item}_norm.weight" for n in (0, 1) for item in "qk"))
def hook_that_sums_what_is_accumulated_at_each_backward(rank, group):
    made = setting(group, has_norms=True)
    for name, parameter in made.model.named_parameters():
        if "_norm" in name:
            parameter.register_post_accumulate_grad_hook(lambda item: dist.all_reduce(item.grad, group=group))
    return made


@plain((NORM,), ("",))
def clipping_by_the_norm_of_local_shards(rank, group):
    def clip(model):
        return nn.utils.clip_grad_norm_([local_of(item) for item in model.parameters()], 0.5)

    return setting(group, kwargs={"clip": clip})


@plain((LATER, "differs from the reference"), ("blocks.0.attention", "blocks.1.attention", ""))
def causal_mask_that_is_dropped(rank, group):
    made = setting(group, kwargs={"reference": whole})
    for block in made.model.blocks:
        block.attention.is_causal = False
    return made


@plain(("differs from the reference",), ("blocks.0.mlp.up", "blocks.0.mlp", ""))
def activation_that_is_another(rank, group):
    """Alike on all ranks: only a reference shows it."""
    made = setting(group, kwargs={"reference": whole})
    change(made.model.blocks[0].mlp, forward=lambda self, x: self.down(torch.tanh(self.gate(x)) * self.up(x)))
    return made


# Sound twins: the same models as they are.


@plain()
def decoder_as_it_is(rank, group):
    return setting(group, has_scale=True, kwargs={"reference": whole(has_scale=True)})


@plain()
def tied_head_and_grouped_keys_and_values(rank, group):
    return setting(group, is_tied=True, kv_heads=2)


@plain()
def labels_that_are_masked(rank, group):
    return setting(group, the_loss=decoders.masked_loss)


@plain()
def norms_of_divided_heads_that_a_hook_sums(rank, group):
    """Each backward's part by itself, before it is accumulated."""
    made = setting(group, has_norms=True)

    def sum_of_ranks(gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    for name, parameter in made.model.named_parameters():
        if "_norm" in name:
            parameter.register_hook(sum_of_ranks)
    return made


@plain()
def clipping_by_the_undivided_norm(rank, group):
    import zeroresize as zr

    def clip(model):
        return zr.clip_grad_norm_(model.parameters(), 0.5)

    return setting(group, kwargs={"clip": clip})


@plain()
def layer_without_gradient(rank, group):
    """What is frozen is no parameter that nothing reads."""
    made = setting(group)
    made.model.blocks[0].mlp.up.requires_grad_(False)
    return made
