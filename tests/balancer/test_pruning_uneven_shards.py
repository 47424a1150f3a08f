"""Pruning on uneven shards: what a plan leaves out is what the unsharded layers would leave out, whoever owns it."""

from itertools import chain

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import parallel_layers
from helpers.parallel_layers import HEAD_SIZE, WIDTH, whole_of
from helpers.processes import for_each
from helpers.states import held_by
from helpers.virtual_training import Run
from torch import nn
from torch.testing import assert_close

import zeroresize as zr
from zeroresize.config.keys import PRIORITIES

pytestmark = pytest.mark.same_ranks

SHARES = {2: (3, 1), 3: (1, 3, 2)}


# ---- gradients ------------------------------------------------------------------------------------------------------


def whole_block(weights, x):
    """What ``parallel_layers.block`` computes, from whole weights by name."""

    def linear(name, x):
        return nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    q, k, v = (linear(f"0.{name}", x).view(*x.shape[:-1], -1, HEAD_SIZE).transpose(1, 2) for name in "qkv")
    scores = (q @ k.transpose(-1, -2) / HEAD_SIZE**0.5).softmax(dim=-1)
    x = x + linear("0.out", (scores @ v).transpose(1, 2).reshape(*x.shape[:-1], -1))
    return linear("2", x + linear("1.down", nn.functional.gelu(linear("1.up", x))))


def masked(weights, parts):
    """Weights without what ranks leave out: y and dx lack its terms then, and dw is zero there, as zero imputation."""
    weights = dict(weights)
    for layer, of_ranks in parts.items():
        mask = torch.zeros_like(weights[f"{layer}.weight"])
        for where, kept in of_ranks:
            if layer in ("0.out", "1.down"):
                mask[:, where] = kept.to(mask.dtype)
            else:
                mask[where] = kept.to(mask.dtype)
        weights[f"{layer}.weight"] = weights[f"{layer}.weight"] * mask
    return weights


class UnevenBlock:
    """``parallel_layers.block``, its heads and neurons divided by shares, in a balancer that prunes what is pinned."""

    def __init__(self, group, shares, **config):
        self.group, self.rank, self.num_ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.model = parallel_layers.block(group)
        attention = self.model[0]
        heads = zr.Segment(
            column=["0.q", "0.k", "0.v"],
            row="0.out",
            unit_size=HEAD_SIZE,
            head_size=HEAD_SIZE,
            kind="heads",
            min_units=0,
            on_change=lambda units: setattr(attention, "num_heads", len(units)),
        )
        zr.convert(self.model, group, segments=[heads])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.config = zr.BalanceConfig(**{"mode": "zero-rd", "shares": shares, "update_every": 100, **config})
        self.balancer = zr.Balancer(self.model, self.optimizer, self.config, process_group=group)
        self.segments = [self.model[0].out.segment, self.model[1].down.segment]
        self.x = parallel_layers.randn(2, 5, WIDTH, dtype=torch.float64)

    def whole(self, of=lambda parameter: parameter):
        """Weights, or what belongs to them, of the unsharded model by name."""
        tensors = {name: of(parameter) for name, parameter in self.model.named_parameters()}
        for segment in self.segments:
            for where in segment.tensors:
                tensors[where.name] = whole_of(tensors[where.name], where, segment.owned, self.group)
        return {name: None if one is None else one.detach().clone() for name, one in tensors.items()}

    def parts(self):
        """Of each layer, by name, what each rank has of it, and which of its columns that rank computes."""
        parts = {}
        for segment in self.segments:
            for name, layer in zip(segment.layers, segment.modules, strict=True):
                pruned = self.balancer.lineage.pruned(name, "w")
                kept = torch.ones(layer.num_columns, dtype=torch.bool)
                kept[[] if pruned is None else pruned] = False
                rows = HEAD_SIZE if segment.kind == "heads" else 1
                units = segment.owned.units_of(self.rank)
                where = torch.from_numpy((units[:, None] * rows + np.arange(rows)).reshape(-1))
                parts[name] = [None] * self.num_ranks
                dist.all_gather_object(parts[name], (where, kept), group=self.group)
        return parts

    def backward(self):
        self.optimizer.zero_grad()
        y = self.model(self.x)
        y.square().sum().backward()
        return y.detach()


@pytest.mark.parametrize("shares", [(3, 1), (1, 0), (1, 3, 2)], ids=str)
def test_a_pruned_step_is_that_of_the_unsharded_layers_without_the_same_columns(run_ranks, shares):
    ratios = (0.5, 0.25, 0.75)[: len(shares)]

    def check(rank, group):
        block = UnevenBlock(group, shares)
        for pinned, ratio in enumerate(ratios):
            block.balancer.pin(pinned, ratio)
        parts = block.parts()
        weights = {name: one.requires_grad_() for name, one in block.whole().items()}
        expected = whole_block(masked(weights, parts), block.x)
        expected.square().sum().backward()
        assert_close(block.backward(), expected, rtol=1e-10, atol=1e-10)
        for name, gradient in block.whole(lambda parameter: parameter.grad).items():
            assert_close(gradient, weights[name].grad, rtol=1e-9, atol=1e-9, msg=lambda text, of=name: f"{of}: {text}")
        counts = [segment.owned.counts[rank] for segment in block.segments]
        return counts, {name: int((~of_ranks[rank][1]).sum()) for name, of_ranks in parts.items()}

    for share, ratio, (counts, pruned) in zip(shares, ratios, run_ranks(check, len(shares)), strict=True):
        num_heads, num_neurons = counts
        assert (num_heads, num_neurons) == (12 * share // sum(shares), 24 * share // sum(shares))
        assert pruned["1.down"] == int(ratio * num_neurons + 0.5)
        assert pruned["0.out"] == int(ratio * num_heads * HEAD_SIZE + 0.5)
        assert pruned["1.up"] == pruned["0.q"] == ratio * WIDTH


# ---- what is known of columns ---------------------------------------------------------------------------------------


def known_of_units(run):
    """What every rank's selector knows of ``down``'s columns: [4, 192] by the number of the neuron."""
    state = run.balancer.state_dict()
    of_rank = held_by(state, next(key for key in state if " rank " in key))
    kinds = "w_var", "age", "pruned_steps", "pruned_of_epoch"
    held = of_rank["units"]["down"], [of_rank["selector"]["columns"]["down"][kind] for kind in kinds]
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, held)
    known = np.full((4, 192), -1.0)
    for units, values in of_ranks:
        assert (known[:, units] == -1.0).all(), "two ranks own a neuron"
        known[:, units] = values
    return known


def same_known(ones, others):
    return np.array_equal(ones, others, equal_nan=True)


def pruning_run(group, **config):
    return Run(group, **{"mode": "zero-pri", "shares": SHARES[dist.get_world_size()], "update_every": 100, **config})


def pin(run, *ratios):
    for rank, ratio in enumerate(ratios[: dist.get_world_size()]):
        run.balancer.pin(rank, ratio)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_known_of_a_column_is_known_to_whoever_owns_its_unit(run_ranks, num_ranks):
    @for_each([(priority,) for priority in PRIORITIES])
    def train(rank, group, priority):
        run = pruning_run(group, priority=priority, iters_per_epoch=4, ageing=0.0)
        pin(run, 0.5, 0.25, 0.75)
        run.steps(7)
        away, pruned = known_of_units(run), run.pruned()
        with run.balancer.at_home():
            home, units = known_of_units(run), run.model.down.segment.owned.counts
        again = known_of_units(run)
        assert all(map(torch.equal, pruned.values(), run.pruned().values()))
        assert len(set(units)) == 1 and run.model.down.segment.owned.counts != units
        return same_known(away, home) and same_known(home, again), away

    for is_same, known in chain.from_iterable(run_ranks(train, num_ranks)):
        w_var, age, pruned_steps, of_epoch = known
        assert is_same and np.isfinite(w_var).any() and set(age) == {0.0, 1.0}
        # The first epoch drew them at random, and what it pruned is pruned on, as nothing is known of it.
        ratio, share = (0.5, 0.25, 0.75)[:num_ranks], SHARES[num_ranks]
        num_pruned = sum(g * 192 * s / sum(share) for g, s in zip(ratio, share, strict=True))
        assert pruned_steps.sum() == 7 * num_pruned and of_epoch.sum() == 3 * num_pruned


def test_freezing_leaves_weights_and_moments_of_pruned_columns_across_moves(run_ranks):
    def train(rank, group):
        run = pruning_run(group, pruned_update="freeze", iters_per_epoch=100)
        run.steps(2)
        pin(run, 0.5, 0.5)
        pruned = run.pruned()

        def of_columns(is_pruned):
            held = []
            for name, columns in pruned.items():
                weight = getattr(run.model, name).weight
                mask = torch.zeros(weight.shape[1], dtype=torch.bool)
                mask[columns] = True
                state = run.optimizer.state[weight]
                tensors = (weight.detach(), state["exp_avg"], state["exp_avg_sq"])
                held += [one[:, mask == is_pruned].clone() for one in tensors]
            return held

        frozen, others = of_columns(True), of_columns(False)
        run.steps(2)
        with run.balancer.at_home():
            pass
        run.steps(2)
        is_frozen = all(map(torch.equal, frozen, of_columns(True)))
        return is_frozen, any(map(torch.equal, others, of_columns(False))), [len(one) for one in pruned.values()]

    assert run_ranks(train, 2) == [(True, False, [24, 72]), (True, False, [24, 24])]


# ---- saved and resumed ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_state_of_another_division_brings_what_is_known_to_the_owners_of_now(run_ranks):
    """Where units do not move they stay as this run was told, and where it may not be away, at home."""
    cases = [("even", (3, 1)), ((3, 1), "even"), ((3, 1), (1, 3))]

    @for_each(cases)
    def train(rank, group, from_shares, to_shares):
        first = pruning_run(group, shares=from_shares, iters_per_epoch=4, priority="variation")
        pin(first, 0.5, 0.25)
        first.steps(6)
        state, known = first.balancer.state_dict(), known_of_units(first)
        first.balancer.close()
        resumed = pruning_run(group, shares=to_shares, iters_per_epoch=4, priority="variation")
        resumed.balancer.load_state_dict(state)
        now, counts = known_of_units(resumed), resumed.model.down.segment.owned.counts
        resumed.steps(4)
        ends = known_of_units(resumed)
        return known, now, counts, np.isfinite(ends[0]).sum(), ends[2].max()

    expected = {"even": (96, 96), (3, 1): (144, 48), (1, 3): (48, 144)}
    of_ranks = [(*case, *told) for rank in run_ranks(train, 2) for case, told in zip(cases, rank, strict=True)]
    for from_shares, to_shares, known, now, counts, num_known, most_steps in of_ranks:
        if to_shares == "even":  # nobody is asked: what is away from here begins anew
            assert counts == (96, 96)
            stayed = np.arange(192) < 144  # rank 1 gives its last ones first
            assert same_known(now[:, stayed], known[:, stayed])
            assert np.isnan(now[0, ~stayed]).all() and not now[1:, ~stayed].any()
        else:  # the state's division, where it has one and this run may be away
            assert counts == (expected[from_shares] if from_shares != "even" else expected[to_shares])
            assert same_known(now, known)
        assert num_known > 96 and most_steps > 6
