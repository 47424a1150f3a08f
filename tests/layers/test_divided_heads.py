"""Heads that several ranks hold, each computing some of the tokens: copies stay alike, all is exact."""

import numpy as np
import pytest
import torch
from helpers import query_heads as heads
from helpers.compiled import compiled
from helpers.on_ranks import on_ranks
from helpers.query_heads import (
    HEAD,
    WIDTH,
    X,
    balanced,
    check_saved,
    require_alike,
    train,
    whole_model,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import parallel as tensor_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import zeroresize as zr
from zeroresize.layers.divided_heads import Division, marked
from zeroresize.layers.shared_rows import Part, SharedRows
from zeroresize.plan.ownership import OwnershipMap

pytestmark = [pytest.mark.same_ranks, pytest.mark.usefixtures("copies_are_cheap", "any_gain_is_enough")]


def num_divided(model):
    """How many heads of the first attention several ranks hold."""
    owned = model[0].q.segment.owned
    return len(owned.apart_by(owned.slices))


def run(moves, micro_batches):
    """As ``require_alike`` takes it; heads are divided after most of these moves."""

    def train_with_moves(model, optimizer, balancer, clip):
        values, divided = train(model, optimizer, 1, clip, balancer.step, micro_batches), []
        is_alone = isinstance(balancer, heads.Alone)
        for shares in moves:
            balancer.move(shares)
            divided.append(is_alone or num_divided(model))
            values += train(model, optimizer, 2, clip, balancer.step, micro_batches)
            with balancer.at_home():
                assert is_alone or not num_divided(model)
        assert sum(map(bool, divided)) >= 2
        return values + train(model, optimizer, 1, clip, balancer.step, micro_batches)

    return train_with_moves


HOSTS = [(of_group, micro_batches, None) for of_group in (1, 4, 8) for micro_batches in (1, 2)]


def divide_heads_of_two_ranks(rank, group, of_group, micro_batches, host):
    moves = [(3.5, 4.5), (4.5, 3.5), (7.5, 0.5)]
    model = require_alike(group, run(moves, micro_batches), of_group=of_group, host=host, divisible=True)
    assert model[0].q.segment.owned.slices == 8


test_two_ranks_divide_heads = on_ranks(2, [(1, 1, None), (4, 2, zr)])(divide_heads_of_two_ranks)
test_two_ranks_divide_further_heads = pytest.mark.slow(
    on_ranks(2, [*HOSTS[1:], (1, 1, tensor_parallel)])(divide_heads_of_two_ranks)
)


@pytest.mark.slow
@on_ranks(4, [(1, 1), (2, 2), (4, 1)])
def test_four_ranks_divide_heads(rank, group, of_group, micro_batches):
    moves = [(1.3, 2.3, 2.2, 2.2), (2.6, 2.6, 0.2, 2.6), (0.7, 3.1, 1.1, 3.1)]
    require_alike(group, run(moves, micro_batches), of_group=of_group, divisible=True)


@pytest.mark.slow
@on_ranks(2)
def test_copies_are_the_same_bits_after_a_hundred_steps_with_clipping(rank, group):
    def train_long(model, optimizer, balancer, clip):
        balancer.move((3.4, 4.6))
        return train(model, optimizer, 100, clip, balancer.step)

    assert num_divided(require_alike(group, train_long, divisible=True))


@pytest.mark.slow
@on_ranks(2, [(True,), (False,)])
def test_forwards_are_checkpointed_and_layers_frozen(rank, group, use_reentrant):
    def checkpointed(model, optimizer, balancer, clip):
        forward, x = model.forward, X.clone().requires_grad_()
        model.forward = lambda part: checkpoint(forward, part, use_reentrant=use_reentrant)
        values = []
        for frozen in ("k", "q", "out"):
            getattr(model[0], frozen).requires_grad_(False)
            balancer.move((3.4, 4.6))
            for _ in range(2):
                model(x).square().mean().backward()
                values.append(clip(model.parameters(), 0.02).item())
                optimizer.step()
                optimizer.zero_grad()
                balancer.step()
            getattr(model[0], frozen).requires_grad_(True)
        return values

    require_alike(group, checkpointed, divisible=True)


@on_ranks(2)
def test_batches_with_fewer_tokens_than_slices_and_single_tokens_are_right(rank, group):
    def of_few_tokens(model, optimizer, balancer, clip):
        balancer.move((3.4, 4.6))
        values = []
        for x in (X[:1, :1], X[:, :1], X[:1, :3], X[0], X[None]):
            loss = model(x).square().mean() if x.ndim == 3 else model(x[None]).square().mean() if x.ndim == 2 else None
            if loss is None:
                continue
            loss.backward()
            values += [loss.item(), clip(model.parameters(), 0.02).item()]
            optimizer.step()
            optimizer.zero_grad()
            balancer.step()
        return values

    require_alike(group, of_few_tokens, divisible=True)


@on_ranks(2)
def test_where_nothing_is_learned_keys_are_those_of_all_tokens(rank, group):
    """Caches that are sorted anew, as in beam search, need them."""
    model, _, balancer = balanced(group, divisible=True)
    balancer.move((3.4, 4.6))
    whole, seen = whole_model(), {}
    rows = slice(HEAD) if rank == 0 else slice(-HEAD, None)
    for name in "kv":
        getattr(model[0], name).register_forward_hook(lambda *args, name=name: seen.update({name: args[-1]}))
    for mode in ("eval", "no_grad"):
        model.train(mode == "no_grad")
        with torch.set_grad_enabled(mode == "eval"):
            torch.testing.assert_close(model(X), whole(X), rtol=1e-12, atol=1e-12)
        for name in "kv":
            torch.testing.assert_close(seen[name][..., rows], getattr(whole[0], name)(X)[..., rows])


@on_ranks(2)
def test_what_is_saved_while_heads_are_divided_is_the_undivided_model_and_loads_in_any_division(
    rank, group, *, tmp_path
):
    divided = {"divisible": True}
    loaded = [((1, 1), divided), ((6, 2), {}), ((4.85, 3.15), divided)]
    model = check_saved(group, tmp_path, (3.4, 4.6), loaded, **divided)
    assert num_divided(model)


@on_ranks(2)
def test_a_settled_step_sends_the_gradients_of_divided_heads_and_nothing_else(rank, group):
    model, optimizer, balancer = balanced(group, 1, divisible=True)
    heads.sent_in_two_steps(model, optimizer, balancer)  # the first step measures, too
    undivided = heads.sent_in_two_steps(model, optimizer, balancer)
    balancer.move((3.4, 4.6))
    sent = heads.sent_in_two_steps(model, optimizer, balancer)
    assert num_divided(model) == 1
    rows, biases = HEAD * WIDTH * 8, 3 * HEAD * 8  # of q, k and v in the first of two layers
    # In each of two steps a message for each layer in backward, and one for all that is handed to the copies.
    assert sum(sent) - sum(undivided) == 2 * 2 * (2 * 4 * rows + biases)
    assert len(sent) - len(undivided) == 2 * (2 * 4 + 1)


@st.composite
def attentions(draw):
    """Operands of attention, and how three ranks divide the slices of its heads."""
    batch, length, groups, of_group = (draw(st.integers(1, most)) for most in (5, 6, 2, 2))
    slices = draw(st.sampled_from([1, 4, 8]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    sizes = [(batch, heads_, length, 4) for heads_ in (groups * of_group, groups, groups)]
    operands = [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]
    mask = draw(st.sampled_from([None, "causal", (batch, 1, length, length), (length, length), (1, 1, 1, length)]))
    options = {"is_causal": True} if mask == "causal" else {}
    if isinstance(mask, tuple):
        options = {"attn_mask": torch.randn(mask, dtype=torch.float64, generator=generator)}
    owners = draw(st.lists(st.integers(0, 2), min_size=groups * of_group * slices, max_size=groups * of_group * slices))
    return operands, options, slices, torch.tensor(owners).view(-1, slices).tolist()


@given(attentions())
def test_ranks_together_compute_attention_once(case):
    operands, options, slices, owners = case
    expected = scaled_dot_product_attention(*operands, enable_gqa=True, **options)
    total, num_tokens = torch.zeros_like(expected), expected.shape[0] * expected.shape[2]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        scaled_dot_product_attention(*operands, enable_gqa=True, **options)
        of_whole = counted.get_total_flops()
        for rank in range(3):
            spans = tuple(
                tuple((first, first + 1) for first in range(slices) if of_head[first] == rank) for of_head in owners
            )
            q = marked(operands[0], Division(spans, slices, num_tokens))
            q = (2 * q.transpose(1, 2).contiguous()).transpose(1, 2) / 2
            total += scaled_dot_product_attention(q, *operands[1:], enable_gqa=True, **options)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    of_ranks = counted.get_total_flops() - of_whole
    assert of_ranks == of_whole > 0 or ("is_causal" in options and of_ranks < of_whole)


@given(st.data(), *(st.integers(1, 6) for _ in range(3)))
def test_keys_are_those_of_all_sequences_of_which_queries_are_computed(data, num_sequences, of_queries, of_keys):
    """However long sequences are, also where keys are of another input, or of one before."""
    slices, block = 8, data.draw(st.sampled_from([8, 16]))
    owners = np.array(data.draw(st.lists(st.integers(0, 2), min_size=2 * block, max_size=2 * block)))
    owned = OwnershipMap(owners, 3, block, slices)
    for rank in range(3):
        queries = SharedRows.of(owned, rank, slices, 1)
        keys = SharedRows.of(owned, rank, block, 1, are_sequences_whole=True)
        if queries is None or keys is None:
            continue
        held, of_all = owned.blocks_of(rank, slices).tolist(), owned.blocks_of(rank, block).tolist()
        computed = np.zeros((len(of_all), num_sequences), dtype=bool)
        parts = keys.parts(torch.Size((num_sequences, of_keys, 1)))
        computed |= parts is None
        for tokens, features in parts or ():
            assert tokens.start % of_keys == tokens.stop % of_keys == 0
            assert not computed[features, tokens.start // of_keys : tokens.stop // of_keys].any()
            computed[features, tokens.start // of_keys : tokens.stop // of_keys] = True
        everything = [Part(slice(0, num_sequences * of_queries), slice(0, len(held)))]
        for tokens, features in queries.parts(torch.Size((num_sequences, of_queries, 1))) or everything:
            for head in held[features]:
                needed = slice(tokens.start // of_queries, -(-tokens.stop // of_queries))
                assert computed[of_all.index(head * slices // block), needed].all() or tokens.start == tokens.stop


@on_ranks(2)
def test_gradients_are_finite_where_norms_have_none_at_zero(rank, group):
    """Of tokens that are not computed queries are zeros."""

    def with_norms(model, optimizer, balancer, clip):
        def forward(x):
            q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (it.q, it.k, it.v))
            q, k = (each / each.norm(dim=-1, keepdim=True) for each in (q, k))
            return it.out(scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))

        it = model[0]
        it.forward = forward
        return run([(3.5, 4.5), (4.5, 3.5)], 1)(model, optimizer, balancer, clip)

    require_alike(group, with_norms, of_group=1, divisible=True)


@on_ranks(2, [(True,), (False,)])
def test_a_trial_divides_heads_and_refuses_sequences_that_do_not_come_first(rank, group, is_training):
    model = heads.divided(group, 1, divisible=True).train(is_training)
    for each in zr.check_segments(model, X):
        assert each.problem is None and each.output_difference < 1e-13 and each.gradient_difference < 1e-13
    assert all(layer.training == is_training for layer in model.modules())
    for attention in model:

        def forward(x, it=attention):
            q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).permute(1, 2, 0, 3) for layer in (it.q, it.k, it.v))
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return it.out(attended.permute(2, 0, 1, 3).flatten(2))

        attention.forward = forward
    with pytest.raises(ValueError, match="2 of 2 segments"):
        zr.check_segments(model, X)


@pytest.mark.slow
@on_ranks(2)
def test_a_compiled_model_divides_heads_also_where_layers_are_frozen(rank, group):
    def run_compiled(model, optimizer, balancer, clip):
        call, values, x = compiled(model)[0], [], X.clone().requires_grad_()
        for number, shares in enumerate(((1, 1), (3.5, 4.5), (4.5, 3.5), (1, 1))):
            balancer.move(shares)
            for frozen in (model[0].k, model[0].out):
                frozen.requires_grad_(number != 1)
            for _ in range(2):
                call(x).square().mean().backward()
                values.append(clip(model.parameters(), 0.02).item())
                optimizer.step()
                optimizer.zero_grad()
                balancer.step()
        return values

    require_alike(group, run_compiled, divisible=True)
