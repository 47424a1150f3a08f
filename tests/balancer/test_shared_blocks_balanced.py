"""What decisions believe of units that share rows is what ranks hold: by optimizers, measured costs, resumed runs."""

import copy

import pytest
import torch
from helpers import query_heads as heads
from helpers.on_ranks import on_ranks
from helpers.query_heads import counts_of, train
from torch import nn

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import segment_works
from zeroresize.plan.ownership import unit_counts

pytestmark = [pytest.mark.same_ranks, pytest.mark.usefixtures("copies_are_cheap")]


def require_believed(model, balancer):
    """Decisions, moves and memory count the units that ranks hold."""
    units, decider = balancer._parts.mover.units, balancer._parts.decider
    for works in (units.works, decider._segments, decider.controller.ownership.segments):
        assert {unit_counts(units.shares, work) for work in works} == set(counts_of(model))
    loads = units.works[0].loads(counts_of(model)[0])
    assert decider.controller.ownership.products == pytest.approx(loads)


def balancer_of(model, group):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, zr.Balancer(model, optimizer, zr.BalanceConfig(mode="off"), process_group=group)


@on_ranks(2)
def test_whole_groups_stay_whole_where_an_optimizer_comes_later(rank, group):
    model = heads.divided(group, 2, shares=(3, 5))
    optimizer, balancer = balancer_of(model, group)
    train(model, optimizer, 2, zr.clip_grad_norm_, balancer.step)
    assert counts_of(model)[0] == (2, 6)
    require_believed(model, balancer)
    balancer.move((1, 1))
    balancer.close()
    optimizer, balancer = balancer_of(model, group)
    balancer.move((3, 5))
    assert counts_of(model)[0] == (3, 5)
    require_believed(model, balancer)


@on_ranks(2)
def test_groups_that_are_dear_to_take_apart_stay_whole_also_in_resumed_runs(rank, group, *, monkeypatch):
    monkeypatch.setattr("zeroresize.control.mover.measure_copies", lambda *_: [0.0, 1.0, 0.0, 0.0, 0.0])
    model = heads.divided(group, 2)
    optimizer, balancer = balancer_of(model, group)
    train(model, optimizer, 1, zr.clip_grad_norm_, balancer.step)
    balancer.move((3, 5))
    assert counts_of(model)[0] == (2, 6)
    require_believed(model, balancer)
    state = copy.deepcopy(balancer.state_dict())
    other = heads.divided(group, 2)
    optimizer, resumed = balancer_of(other, group)
    resumed.load_state_dict(state)
    train(other, optimizer, 2, zr.clip_grad_norm_, resumed.step)
    assert counts_of(other)[0] == (2, 6)
    require_believed(other, resumed)


@on_ranks(3)
def test_copies_at_home_are_no_slowness(rank, group):
    """Of 8 heads with 2 of keys on three ranks the second has two of keys: 3, 3 and 2 heads, 1, 2 and 1."""
    model = heads.divided(group)
    loads = segment_works(balanced_layers(model))[0].loads((3, 3, 2))
    products = 2 * heads.HEADS * heads.HEAD * heads.WIDTH + 2 * 2 * heads.HEAD * heads.WIDTH
    expected = [
        (2 * of_queries + 2 * of_keys) * heads.HEAD * heads.WIDTH * 3 / products
        for of_queries, of_keys in ((3, 1), (3, 2), (2, 1))
    ]
    assert loads == pytest.approx(expected)
    works = segment_works(balanced_layers(copy.deepcopy(model)))  # which has no segments
    total = [sum(load * work.work for load, work in zip(of_rank, works, strict=True)) for of_rank in loads_of(works)]
    outside = 1.0 - sum(work.work for work in works)
    assert [outside + of_rank for of_rank in total] == pytest.approx(expected)


def loads_of(works):
    return zip(*(work.loads(unit_counts((1.0,) * 3, work)) for work in works), strict=True)


@on_ranks(3)
def test_keys_that_ranks_hold_twice_are_drawn_anew_in_their_shapes(rank, group):
    model = heads.divided(group)
    attention, whole = model[0], nn.Linear(heads.WIDTH, 2 * heads.HEAD, dtype=torch.float64)
    shape = attention.k.weight.shape
    torch.manual_seed(1)
    whole.reset_parameters()
    torch.manual_seed(1)
    attention.k.reset_parameters()
    assert attention.k.weight.shape == shape == ((2 if rank == 1 else 1) * heads.HEAD, heads.WIDTH)
    blocks = {0: [0], 1: [0, 1], 2: [1]}[rank]
    assert torch.equal(attention.k.weight, whole.weight.unflatten(0, (2, -1))[blocks].flatten(0, 1))


@on_ranks(3)
def test_a_fused_optimizer_is_refused_where_ranks_hold_keys_twice(rank, group):
    model = heads.divided(group)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(ValueError, match=r"share rows are on several ranks, .* use fused=False"):
        zr.Balancer(model, optimizer, process_group=group)
    train_step = lambda: train(model, optimizer, 1, zr.clip_grad_norm_)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"several ranks hold rows of layer 0\.k, and AdamW .* use fused=False"):
        train_step()


@zr.mark_elementwise
class InTurn(torch.optim.SGD):
    """Steps parts of the parameters by other optimizers, in another order on every rank, as ZeRO's shards are."""

    def __init__(self, parameters, rank):
        super().__init__(parameters, lr=0.1)
        owned = self.param_groups[0]["params"]
        parts = [torch.optim.SGD(owned[first::3], lr=0.1) for first in range(3)]
        self.parts = parts[rank:] + parts[:rank]

    def step(self):
        for part in self.parts:
            part.step()


@on_ranks(2)
def test_optimizers_within_an_optimizers_step_hand_nothing_out(rank, group):
    def run(model, optimizer, balancer, clip):
        balancer.move((3, 5))
        optimizer = torch.optim.SGD if isinstance(balancer, heads.Alone) else InTurn
        of_rank = {"lr": 0.1} if optimizer is torch.optim.SGD else {"rank": rank}
        return train(model, optimizer(model.parameters(), **of_rank), 4, clip)

    heads.require_alike(group, run)


@on_ranks(2)
def test_gradients_count_once_after_a_step_that_failed(rank, group):
    @zr.mark_elementwise
    class Failing(torch.optim.SGD):
        def step(self):
            raise OSError

    def run(model, optimizer, balancer, clip):
        balancer.move((3, 5))
        model(heads.X).square().mean().backward()
        with pytest.raises(OSError):
            Failing(model.parameters()).step()
        optimizer.zero_grad()
        return train(model, optimizer, 3, clip, balancer.step)

    heads.require_alike(group, run)
