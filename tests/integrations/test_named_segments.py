"""Segments that a user names: what convert refuses before anything runs, and what zero units do."""

import pytest
import torch
import torch.nn.functional as F
from helpers.on_ranks import on_ranks
from torch import nn

import zeroresize as zr
from zeroresize import ColumnParallelLinear, RowParallelLinear
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import owned_segments

WIDTH, HEAD = 8, 4


class Attention(nn.Module):
    """Eight heads of queries and four of keys and values on all ranks."""

    def __init__(self, group, *, keeps_size=True, key_heads=4):
        super().__init__()
        made_for = {"process_group": group, "dtype": torch.float64}
        self.q = ColumnParallelLinear(WIDTH, 8 * HEAD, **made_for)
        self.k, self.v = (ColumnParallelLinear(WIDTH, key_heads * HEAD, **made_for) for _ in "kv")
        self.out = RowParallelLinear(8 * HEAD, WIDTH, **made_for)
        self.num_heads, self.num_kv_heads = 8 // group.size(), key_heads // group.size()
        self.scaling = 1.0
        if keeps_size:
            self.head_dim = HEAD

    def follow(self, units):
        self.num_heads, self.num_kv_heads = 2 * len(units), len(units)

    def forward(self, x):
        groups = self.num_heads // self.num_kv_heads
        q, k, v = (one(x).unflatten(-1, (-1, HEAD)).transpose(-2, -3) for one in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(groups, -3) for one in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


def segment(model, *, by_module=False, **options):
    options = {"unit_size": 2 * HEAD, "kind": "KV groups", "on_change": model[0].follow} | options
    layers = [model[0].q, model[0].k, model[0].v, model[0].out] if by_module else ["0.q", "0.k", "0.v", "0.out"]
    return zr.Segment(layers[:-1], layers[-1], **options)


def converted(group, shares=None, *, keeps_size=True, key_heads=4, **options):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(group, keeps_size=keeps_size, key_heads=key_heads))
    named = segment(model, **options)
    zr.convert(model, process_group=group, segments=[named], shares=shares)
    return model


REFUSED = {
    "a unit that is no head": ({"unit_size": 2}, r"makes 2 features of 0\.q a unit, which are no whole heads"),
    "heads of a size that nobody told": (
        {"unit_size": HEAD, "keeps_size": False},
        r"different numbers of features of a unit \(4 of 0\.q, 2 of 0\.k, 2 of 0\.v, 4 of 0\.out\).*head_size=",
    ),
    "the wrong size": ({"head_size": 3}, r"no whole heads of 3 \(head_size\)"),
    "no unit_size": (
        {"unit_size": 1, "key_heads": 8, "on_change": None, "kind": "heads"},
        r"unit_size=1 makes 1 feature of 0\.q a unit, which are no whole heads of 4 \(Attention\.head_dim\): "
        "say unit_size=4 for one head",
    ),
    "heads of one feature, and no on_change": (
        {"unit_size": 1, "key_heads": 8, "head_size": 1, "on_change": None, "kind": "heads"},
        r"Attention\.num_heads=4 seems to count .* no on_change",
    ),
}


@on_ranks(2, REFUSED.values())
def test_what_would_fail_in_use_is_refused_by_convert(rank, group, options, message):
    for by_module in (False, True):  # a message gives names all the same
        with pytest.raises(ValueError, match=message) as error:
            converted(group, by_module=by_module, **options)
        assert str(error.value).startswith("Segment(column=['0.q', '0.k', '0.v'], row='0.out'): ")
        assert "zeroresize.check_segments" in str(error.value)


def test_every_rank_keeps_a_unit_unless_the_user_says_that_it_needs_none(run_ranks):
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def check(rank, group):
        even, uneven = converted(group), converted(group, (1, 0))
        assert owned_segments(balanced_layers(uneven))[0].owned.counts == (3, 1)
        torch.testing.assert_close(uneven(x), even(x))
        empty = converted(group, (1, 0), min_units=0)
        assert owned_segments(balanced_layers(empty))[0].owned.counts == (4, 0)

    run_ranks(check, 2)


@on_ranks(2)
def test_a_follower_that_fails_is_named(rank, group):
    message = r"on_change of the segment of 0\.out failed for [13] KV groups: KeyError: 'slopes'"
    with pytest.raises(RuntimeError, match=message):
        converted(group, (1, 0), on_change=lambda units: {}["slopes"])


def test_a_registered_class_without_a_follower_stays_even(run_ranks, monkeypatch, caplog):
    from zeroresize.integrations import known_modules, register_segments

    monkeypatch.setattr(known_modules, "_adapters", dict(known_modules._adapters))
    register_segments(Attention, lambda one: zr.Segment([one.q, one.k, one.v], one.out, unit_size=2 * HEAD))

    def check(rank, group):
        model = nn.Sequential(Attention(group))
        zr.convert(model, process_group=group)
        assert owned_segments(balanced_layers(model)) == []
        assert "Attention.num_heads=4 seems to count what this rank holds" in caplog.text

    caplog.set_level("DEBUG", logger="zeroresize")
    run_ranks(check, 2)
