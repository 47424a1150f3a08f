"""Queries' heads as units under grouped queries: groups are apart, copies of k and v stay alike, all is exact."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.on_ranks import gathered, on_ranks
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import zeroresize as zr

HEAD, WIDTH, HEADS = 4, 12, 8
X = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    def __init__(self, of_group, bias=True):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias, dtype=torch.float64)
        self.k, self.v = (nn.Linear(WIDTH, HEADS // of_group * HEAD, bias, dtype=torch.float64) for _ in range(2))
        self.out = nn.Linear(HEADS * HEAD, WIDTH, dtype=torch.float64)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def whole_model(of_group=4):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(Attention(of_group), Attention(of_group, bias=False))


def divided(group, of_group=4, **options):
    model = whole_model(of_group)
    segments = []
    for number, attention in enumerate(model):
        for name in ("q", "k", "v"):
            layer = zr.ColumnParallelLinear.from_linear(getattr(attention, name), process_group=group)
            setattr(attention, name, layer)
        attention.out = zr.RowParallelLinear.from_linear(attention.out, process_group=group)
        segments.append(
            zr.Segment(
                [f"{number}.q"],
                f"{number}.out",
                unit_size=HEAD,
                shared=[f"{number}.k", f"{number}.v"],
                group_size=of_group,
                kind="heads",
                min_units=int(of_group == 2),  # else whole groups pay where so much of attention is k and v
                on_change=lambda units: None,
            )
        )
    return zr.convert(model, process_group=group, segments=segments, **options)


def train(model, optimizer, num_steps, clip, after_step=lambda: None, micro_batches=2):
    values = []
    for _ in range(num_steps):
        for part in X.chunk(micro_batches):
            loss = model(part).square().mean() / micro_batches
            loss.backward()
            values.append(loss.item())
        values.append(clip(model.parameters(), 0.02).item())
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    return values


def balanced(group, of_group=4, **options):
    model = divided(group, of_group, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, zr.Balancer(model, optimizer, zr.BalanceConfig(mode="off"), process_group=group)


def counts_of(model):
    return [attention.out.segment.owned.counts for attention in model]


def require_copies_alike(model, group):
    """Copies of a block are the same bits on all ranks that hold it."""
    for attention in model:
        for where in (each for each in attention.out.segment.tensors if each.block > 1):
            held = where.held(attention.out.segment.owned, dist.get_rank(group)).tolist()
            blocks = where.parameter.detach().unflatten(0, (-1, HEAD)) if held else []
            by_rank = gathered(group, dict(zip(held, blocks, strict=True)))
            for block in {number for of_rank in by_rank for number in of_rank}:
                first, *others = (of_rank[block] for of_rank in by_rank if block in of_rank)
                assert all(torch.equal(first, other) for other in others)


def check_training(rank, group, moves, of_group=4):
    model, optimizer, balancer = balanced(group, of_group)
    whole = whole_model(of_group)
    wholes = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    home = counts_of(model)
    values = train(model, optimizer, 2, zr.clip_grad_norm_, balancer.step)
    for shares, counts in moves:
        balancer.move(shares)
        assert counts_of(model) == [counts, counts]
        values += train(model, optimizer, 3, zr.clip_grad_norm_, balancer.step)
        require_copies_alike(model, group)
        with balancer.at_home():
            assert counts_of(model) == home
    balancer.move((1,) * dist.get_world_size(group))
    values += train(model, optimizer, 2, zr.clip_grad_norm_, balancer.step)
    expected = train(whole, wholes, 4 + 3 * len(moves), clip_grad_norm_)
    assert values == pytest.approx(expected, rel=1e-10, abs=0.0)


@on_ranks(2)
def test_groups_that_are_apart_train_as_the_undivided_model(rank, group):
    moves = [((3, 5), (3, 5)), ((5, 3), (5, 3)), ((6, 2), (6, 2)), ((8, 0), (8, 0)), ((1, 7), (0, 8))]
    check_training(rank, group, moves)


@on_ranks(4)
def test_four_ranks_may_have_parts_of_several_groups(rank, group):
    moves = [(each, each) for each in ((1, 3, 2, 2), (3, 1, 1, 3), (1, 4, 2, 1))]
    check_training(rank, group, moves, of_group=2)


@on_ranks(2)
def test_what_is_saved_apart_is_the_undivided_model_and_loads_in_any_division(rank, group, *, tmp_path):
    model, optimizer, balancer = balanced(group)
    balancer.move((3, 5))
    train(model, optimizer, 3, zr.clip_grad_norm_, balancer.step)
    dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path)
    whole = whole_model()
    train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), 3, clip_grad_norm_)
    read = {key: torch.empty_like(value) for key, value in whole.state_dict().items()}
    dcp.load(read, checkpoint_id=tmp_path)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(read[key], value, rtol=1e-9, atol=1e-12)
    for shares in ((1, 1), (6, 2), (5, 3)):
        other, others, its_balancer = balanced(group)
        its_balancer.move(shares)
        dcp.load(zr.sharded_state_dict(other, others), checkpoint_id=tmp_path)
        require_copies_alike(other, group)
        with its_balancer.at_home(), balancer.at_home():
            for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
                assert torch.equal(ours, theirs)
                assert torch.equal(others.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"])


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
    sent, all_reduce = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **kwargs)

    model, optimizer, balancer = balanced(group)
    with pytest.MonkeyPatch.context() as patched:
        train(model, optimizer, 2, lambda *_: torch.zeros(()), balancer.step, micro_batches=1)
        patched.setattr(dist, "all_reduce", counting)
        train(model, optimizer, 2, lambda *_: torch.zeros(()), balancer.step, micro_batches=1)
        undivided = sum(sent)
        balancer.move((3, 5))
        sent.clear()
        train(model, optimizer, 2, lambda *_: torch.zeros(()), balancer.step, micro_batches=1)
    of_block = HEAD * WIDTH * 8
    with_biases = of_block + HEAD * 8  # of one block each of k and v, in two layers, of which one has biases
    assert sum(sent) - undivided == 2 * (2 * with_biases + 2 * of_block)
