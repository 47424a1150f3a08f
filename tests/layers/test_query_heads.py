"""Queries' heads as units under grouped queries: groups are apart, copies of k and v stay alike, all is exact."""

import pytest
import torch
import torch.distributed as dist
from helpers import query_heads as heads
from helpers.on_ranks import on_ranks
from helpers.query_heads import HEAD, WIDTH, balanced, check_saved, counts_of, require_copies_alike, train, whole_model
from torch.distributed.tensor import parallel as tensor_parallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import zeroresize as zr
from zeroresize.layers.local_parts import local_of

pytestmark = [pytest.mark.same_ranks, pytest.mark.usefixtures("copies_are_cheap")]


def clip_dtensors(parameters, most):
    """Torch's clipping, which knows DTensors and nothing of this package."""
    return local_of(clip_grad_norm_(parameters, most).full_tensor())


def check_training(rank, group, moves, of_group=4, host=None):
    clip = zr.clip_grad_norm_ if host is None else clip_dtensors
    model, optimizer, balancer = balanced(group, of_group, host)
    whole = whole_model(of_group)
    wholes = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    home = counts_of(model)
    values = train(model, optimizer, 2, clip, balancer.step)
    for shares, counts in moves:
        balancer.move(shares)
        assert counts_of(model) == [counts, counts]
        values += train(model, optimizer, 3, clip, balancer.step)
        require_copies_alike(model, group)
        with balancer.at_home():
            assert counts_of(model) == home
    balancer.move((1,) * dist.get_world_size(group))
    values += train(model, optimizer, 2, clip, balancer.step)
    expected = train(whole, wholes, 4 + 3 * len(moves), clip_grad_norm_)
    assert values == pytest.approx(expected, rel=1e-10, abs=0.0)


@on_ranks(2)
def test_groups_that_are_apart_train_as_the_undivided_model(rank, group):
    moves = [((3, 5), (3, 5)), ((5, 3), (5, 3)), ((6, 2), (6, 2)), ((8, 0), (8, 0)), ((1, 7), (0, 8))]
    check_training(rank, group, moves)


@pytest.mark.slow
@on_ranks(2, [(tensor_parallel,), (zr,)])
def test_groups_of_dtensors_are_apart_and_torchs_clipping_is_right(rank, group, host):
    moves = [((3, 5), (3, 5)), ((5, 3), (5, 3)), ((1, 7), (1, 7))]
    check_training(rank, group, moves, host=host)


@on_ranks(2, [(None,), (tensor_parallel,), (zr,)])
def test_one_key_head_is_held_by_two_ranks(rank, group, host):
    check_training(rank, group, [((3, 5), (3, 5)), ((5, 3), (5, 3)), ((7, 1), (7, 1))], of_group=8, host=host)


@pytest.mark.slow
@on_ranks(4, [(None,), (tensor_parallel,)])
def test_two_key_heads_are_held_by_four_ranks(rank, group, host):
    check_training(rank, group, [((1, 3, 2, 2), (1, 3, 2, 2))], of_group=4, host=host)


@pytest.mark.slow
@on_ranks(3, [(None,), (tensor_parallel,)])
def test_two_key_heads_are_held_by_three_ranks(rank, group, host):
    check_training(rank, group, [((2, 3, 3), (2, 3, 3)), ((3, 2, 3), (3, 1, 4))], of_group=4, host=host)


@on_ranks(4)
def test_four_ranks_may_have_parts_of_several_groups(rank, group):
    moves = [(each, each) for each in ((1, 3, 2, 2), (3, 1, 1, 3), (1, 4, 2, 1))]
    check_training(rank, group, moves, of_group=2)


@on_ranks(2)
def test_what_is_saved_apart_is_the_undivided_model_and_loads_in_any_division(rank, group, *, tmp_path):
    check_saved(group, tmp_path, (3, 5), [((1, 1), {}), ((6, 2), {}), ((5, 3), {})])


@on_ranks(2)
def test_keys_that_are_frozen_and_free_again_and_checkpointed_forwards_are_right(rank, group):
    model, optimizer, balancer = balanced(group)
    whole = whole_model()
    wholes = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    values = []
    for trained, steps, clip in ((model, optimizer, zr.clip_grad_norm_), (whole, wholes, clip_grad_norm_)):
        after_step = balancer.step if trained is model else lambda: None
        trained[0].k.requires_grad_(False)
        if trained is model:
            balancer.move((3, 5))
        of_model = train(trained, steps, 2, clip, after_step)
        trained[0].k.requires_grad_(True)
        of_model += train(trained, steps, 2, clip, after_step)
        forward = trained.forward
        trained.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
        of_model += train(trained, steps, 2, clip, after_step, micro_batches=1)
        values.append(of_model)
    assert values[0] == pytest.approx(values[1], rel=1e-10, abs=0.0)
    require_copies_alike(model, group)


@on_ranks(2)
def test_a_settled_step_sends_the_gradients_of_groups_apart_and_nothing_else(rank, group):
    model, optimizer, balancer = balanced(group)
    heads.sent_in_two_steps(model, optimizer, balancer)  # the first step measures, too
    undivided = sum(heads.sent_in_two_steps(model, optimizer, balancer))
    balancer.move((3, 5))
    sent = heads.sent_in_two_steps(model, optimizer, balancer)
    of_block = HEAD * WIDTH * 8
    with_biases = of_block + HEAD * 8  # of one block each of k and v, in two layers, of which one has biases
    # Two steps, in each the sums of backward, and what is handed to the copies.
    assert sum(sent) - undivided == 2 * 2 * (2 * with_biases + 2 * of_block)
