"""check_segments(): what it lets pass, what it refuses, and that it leaves everything as it was."""

import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import parallel_layers
from helpers.processes import caught_log_lines, for_each
from torch import nn

import zeroresize as zr
from zeroresize import ColumnParallelLinear, RowParallelLinear
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import owned_segments

CONFIG = zr.BalanceConfig(mode="exact")
WIDTH, HEADS, HEAD = 8, 8, 4
SLOPES = torch.arange(1.0, HEADS + 1.0).view(-1, 1, 1) / 8


class Alibi(nn.Module):
    """Attention that is biased by a slope for each of this rank's heads."""

    def __init__(self, group):
        super().__init__()
        self.qkv = ColumnParallelLinear(WIDTH, 3 * HEADS * HEAD, process_group=group)
        self.out = RowParallelLinear(HEADS * HEAD, WIDTH, process_group=group)
        self.num_heads = HEADS // group.size()
        self.slopes = SLOPES.chunk(group.size())[group.rank()]

    def forward(self, x, scale=1.0):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, HEAD)).movedim(-3, 0).transpose(-2, -3)
        bias = -self.slopes.to(x.dtype) * torch.arange(x.shape[1], dtype=x.dtype)
        return scale * self.out(F.scaled_dot_product_attention(q, k, v, bias).transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.attention, self.norm = Alibi(group), nn.BatchNorm1d(WIDTH)
        self.mlp = nn.Sequential(
            ColumnParallelLinear(WIDTH, 16, process_group=group),
            nn.GELU(),
            nn.Dropout(0.2),
            RowParallelLinear(16, WIDTH, process_group=group),
        )

    def forward(self, x, scale=1.0):
        x = x + self.attention(x, scale)
        return x + self.mlp(self.norm(x.transpose(1, 2)).transpose(1, 2))


def follows_all(attention):
    def follow(heads):
        attention.num_heads, attention.slopes = len(heads), SLOPES[heads]

    return follow


def follows_counts(attention):
    def follow(heads):
        attention.num_heads, attention.slopes = len(heads), SLOPES[: len(heads)]

    return follow


def converted(group, follow=follows_all, config=CONFIG, **options):
    torch.manual_seed(0)
    model = Block(group)
    options = {"unit_size": HEAD, "parts": 3, "kind": "heads", "on_change": follow(model.attention)} | options
    named = zr.Segment(["attention.qkv"], "attention.out", **options)
    return zr.convert(model, process_group=group, segments=[named])


def batch(dtype=torch.float32):
    x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return {"x": x, "scale": 0.5}


@pytest.mark.slow
def test_a_follower_that_sets_all_that_is_of_single_units_passes(run_ranks):
    def check(rank, group):
        checks = zr.check_segments(converted(group), batch())
        assert [(one.name, one.kind) for one in checks] == [("attention.out", "heads"), ("mlp.3", "neurons")]
        for result in checks:
            assert result.problem is None and result.output_difference < 1e-13 and result.gradient_difference < 1e-13

    run_ranks(check, 2)
    run_ranks(check, 4)


def test_a_segment_of_which_no_rank_may_give_a_unit_is_not_tried(run_ranks):
    """Such as heads of which each rank has one, and must keep it."""

    def check(rank, group):
        with caught_log_lines() as lines:
            checks = zr.check_segments(converted(group, min_units=HEADS // 2), batch())
        assert math.isnan(checks[0].output_difference) and checks[0].problem is None
        assert checks[1].output_difference < 1e-13
        assert any("units of 1 segments can move (1 of neurons)" in line for line in lines) == (rank == 0)
        return any("attention.out (heads): not tried" in line for line in lines)

    assert run_ranks(check, 2)[0]


def follows_only_away(attention):
    def follow(heads):
        attention.num_heads = len(heads)
        attention.slopes = SLOPES[:4] if heads == [4, 5, 6, 7] else SLOPES[heads]

    return follow


WRONG = [
    # Constants that stay, a follower that does not come home, and one that fails.
    (follows_counts, r"1 of 2 segments .* attention\.out \(heads\): with the first .* outputs differ by"),
    (follows_only_away, r"with all units at home again outputs differ by"),
    (lambda attention: lambda heads: heads[9], "failed for .* heads: IndexError"),
]


def test_what_depends_on_who_owns_a_unit_is_an_error_on_every_rank(run_ranks):
    @for_each(WRONG)
    def check(rank, group, follow, message):
        model = converted(group, follow)
        before, weights = copy.deepcopy(model.state_dict()), list(model.parameters())
        slopes, segments = model.attention.slopes, owned_segments(balanced_layers(model))
        with pytest.raises(ValueError, match=message) as error:
            zr.check_segments(model, batch())
        assert "mlp.3" not in str(error.value)
        assert all(one is other for one, other in zip(model.parameters(), weights, strict=True))
        assert parallel_layers.same(dict(model.state_dict()), dict(before)) and all(
            segment.owned.is_home for segment in segments
        )
        assert model.attention.slopes is slopes and model.attention.num_heads == HEADS // 2
        return str(error.value)

    first, other = run_ranks(check, 2, timeout_s=30)
    assert first == other


def test_it_says_what_it_needs(run_ranks):
    def check(rank, group):
        model = converted(group)
        with pytest.raises(ValueError, match="results of two calls differ by"):
            zr.check_segments(model, batch(), forward=lambda model, batch: model(**batch) * counter.pop())
        with pytest.raises(ValueError, match="not compute the batch in float64: rank 0: KeyError"):
            zr.check_segments(model, batch(), forward=lambda model, batch: model(batch["y"]))
        with pytest.raises(ValueError, match="returns no tensor that gradients can be taken of"):
            zr.check_segments(model, batch(), forward=lambda model, batch: model(**batch).detach())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        balancer = zr.Balancer(model, optimizer, process_group=group, config=CONFIG)
        balancer.move((3, 1))
        with pytest.raises(ValueError, match=r"units of attention\.out are away: .*at_home"):
            zr.check_segments(model, batch())
        with balancer.at_home():
            assert len(zr.check_segments(model, batch())) == 2
        even = nn.Sequential(ColumnParallelLinear(4, 4, process_group=group), nn.Softmax(-1))
        zr.convert(even, process_group=group)
        with pytest.raises(ValueError, match="no segment whose units may move"):
            zr.check_segments(even, torch.zeros(1, 4))
        alone = [dist.new_group([other]) for other in range(2)][rank]
        assert zr.check_segments(converted(alone), batch()) == []

    counter = [2.0, 1.0]
    run_ranks(check, 2)


class Skipping(nn.Module):
    """A rank without heads leaves out layers in which the others meet it."""

    def __init__(self, group):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.up = ColumnParallelLinear(WIDTH, 16, process_group=group)
        self.down = RowParallelLinear(16, WIDTH, process_group=group)
        self.num_units = 16 // group.size()

    def forward(self, x):
        x = self.first(x)
        return x if self.num_units == 0 else x + self.down(torch.tanh(self.up(x)))


class Centred(nn.Module):
    """Subtracts an average that every forward in training moves."""

    def __init__(self, group):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.block = Block(group).mlp

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return self.block(x - self.mean)


def fails_on_a_rank(group):
    model = converted(group, min_units=0)

    def divide(module, inputs):
        module.share = HEADS // module.num_heads

    def forward(model, batch):
        model.attention.register_forward_pre_hook(divide)
        return model(**batch)

    with pytest.raises(ValueError, match=r"attention\.out \(heads\): rank 0: ZeroDivisionError"):
        zr.check_segments(model, batch(), forward=forward)
    assert not model.attention._forward_pre_hooks


def leaves_out_layers(group):
    model = Skipping(group)
    follow = functools.partial(setattr, model, "num_units")
    segment = zr.Segment(["up"], "down", min_units=0, on_change=lambda units: follow(len(units)))
    zr.convert(model, process_group=group, segments=[segment])
    with pytest.raises(ValueError, match=r"down \(units\): the ranks run different layers"):
        zr.check_segments(model, torch.ones(3, WIDTH))


def reads_and_moves_a_buffer(group):
    torch.manual_seed(0)
    model = zr.convert(Centred(group), process_group=group)
    (result,) = zr.check_segments(model, torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)))
    assert result.problem is None and not model.mean.any()


@pytest.mark.slow
def test_forwards_that_fail_or_differ_on_a_rank_end_on_all_and_moving_buffers_do_no_harm(run_ranks):
    cases = fails_on_a_rank, leaves_out_layers, reads_and_moves_a_buffer
    run_ranks(for_each([[case] for case in cases])(lambda rank, group, case: case(group)), 2, timeout_s=30)
