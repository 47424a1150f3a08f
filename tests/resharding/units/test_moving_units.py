"""Units move, with all that belongs to them, and training goes on as if they had not."""

import copy
import functools
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import parallel_layers
from helpers.on_ranks import gathered, on_ranks
from helpers.parallel_layers import everything_of, held, home, same, segments_of, uneven
from helpers.processes import for_each

from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.functional import LastGradients
from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.plan.layer import LayerPlan
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.resharding.units.moving_units import bytes_of_units, move_units

pytestmark = pytest.mark.same_ranks


class Lion(torch.optim.Optimizer):
    """An optimizer that this package has never heard of."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
            parameter -= 1e-2 * (0.9 * momentum + 0.1 * parameter.grad).sign()
            momentum.mul_(0.99).add_(parameter.grad, alpha=0.01)


OPTIMIZERS = {
    "AdamW, foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "AdamW, fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AMSGrad": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
    "plain SGD": functools.partial(torch.optim.SGD, lr=1e-1),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-1),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "Lion": Lion,
}


def loss_of(model, step):
    x = torch.randn(2, 3, parallel_layers.WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return model(x).square().mean()


def train(model, optimizer, steps):
    """Losses of some steps; the last gradients stay, and so does the graph of the last loss."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


def mover(group, optimizer, **options):
    return functools.partial(move_units, process_group=group, optimizer=optimizer, **options)


def check_training(rank, group, name):
    """Moves there, on, and home in the middle of training, beside the same training without moves."""
    model, other = parallel_layers.block(group), parallel_layers.block(group)
    try:
        optimizer, other_optimizer = (OPTIMIZERS[name](each.parameters()) for each in (model, other))
    except RuntimeError:  # torch 2.2 has no fused AdamW for CPUs
        return
    segments, parameters = segments_of(model, group), list(model.parameters())
    ranks = dist.get_world_size(group)
    losses, expected = [], []
    for turn, targets in enumerate([uneven(ranks), uneven(ranks, 1), home(ranks), uneven(ranks, 2)]):
        steps = range(2 * turn, 2 * turn + 2)
        losses += train(model, optimizer, steps)
        expected += train(other, other_optimizer, steps)
        before = everything_of(segments, optimizer, group)
        mover(group, optimizer)(segments, targets)
        assert all(segment.owned == targets[segment.name] for segment in segments)
        assert same(everything_of(segments, optimizer, group), before)
    losses += train(model, optimizer, range(8, 10))
    expected += train(other, other_optimizer, range(8, 10))
    assert all(one is another for one, another in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-10, atol=1e-10)
    require_same_wholes(segments, optimizer, segments_of(other, group), other_optimizer, group)


def require_same_wholes(segments, optimizer, others, other_optimizer, group):
    tensors, wanted = everything_of(segments, optimizer, group), everything_of(others, other_optimizer, group)
    assert tensors.keys() == wanted.keys()
    for name, whole in wanted.items():
        torch.testing.assert_close(tensors[name], whole, rtol=1e-10, atol=1e-10, msg=name)


def test_training_goes_on_as_without_moves(run_ranks):
    run_ranks(for_each([["AdamW, foreach"], ["Lion"]])(check_training), 2)


@pytest.mark.slow
def test_training_with_other_optimizers_and_on_more_ranks_too(run_ranks):
    run_ranks(for_each([["AdamW, foreach"], ["SGD"]])(check_training), 4)
    run_ranks(for_each([[name] for name in list(OPTIMIZERS)[1:-1]])(check_training), 2)


def test_there_and_home_again_leaves_every_bit_whatever_the_rounds(run_ranks):
    # Of one head: weights of four layers and biases of q and v; weight, gradient and two moments of each.
    of_head = 4 * 8 * parallel_layers.HEAD_SIZE * (4 * parallel_layers.WIDTH + 2)
    of_neuron = 4 * 8 * (2 * parallel_layers.WIDTH + 1)
    maps = [home(3), uneven(3), uneven(3, 1), uneven(3, 2), home(3)]

    @for_each([[3000], [2**26]])
    def check(rank, group, max_bytes):
        model = parallel_layers.block(group)
        optimizer = torch.optim.AdamW(model.parameters())
        segments = segments_of(model, group)
        train(model, optimizer, range(2))
        _, before = held(segments, optimizer)
        reports = [mover(group, optimizer, max_bytes=max_bytes)(segments, targets) for targets in maps[1:]]
        assert same(held(segments, optimizer)[1], before)
        assert bytes_of_units(segments, optimizer) == (4 * of_head + 8 * of_neuron) * 3 // 4  # without gradients
        for report, (here, there) in zip(reports, itertools.pairwise(maps), strict=True):
            assert report.buffer_bytes <= max(max_bytes, of_head)
            assert report.num_rounds == 1 or max_bytes < 2**26
            assert (report.sent_bytes, report.received_bytes) == tuple(
                sum(
                    size * np.count_nonzero((first[name].owners == rank) & (other[name].owners != rank))
                    for name, size in (("0.out", of_head), ("1.down", of_neuron))
                )
                for first, other in ((here, there), (there, here))
            )

    run_ranks(check, 3)


@on_ranks(2)
def test_gradients_move_along_in_the_middle_of_accumulation(rank, group):
    model, other = parallel_layers.block(group), parallel_layers.block(group)
    segments = segments_of(model, group)
    loss_of(model, 0).backward()
    mover(group, None)(segments, uneven(2))
    loss_of(model, 1).backward()
    for step in range(2):
        loss_of(other, step).backward()
    assert "1.up.weight gradient" in everything_of(segments, None, group)
    require_same_wholes(segments, None, segments_of(other, group), None, group)


@on_ranks(2)
def test_a_gradient_that_only_one_rank_has_travels_and_is_zero_elsewhere(rank, group):
    model = parallel_layers.block(group)
    segments = segments_of(model, group)
    weight = model[1].up.weight
    if rank == 0:
        weight.grad = torch.ones_like(weight)
    mover(group, None)(segments, uneven(2))
    first, second = gathered(group, weight.grad.sum(dim=1).tolist())
    assert first == [8.0] * 3 and sorted(second) == [0.0] * 12 + [8.0] * 9


@on_ranks(2)
def test_a_rank_without_units_takes_over_the_state_of_those_that_have_some(rank, group):
    """Its optimizer has none: the layer's gradient there was None all the time."""

    model = parallel_layers.block(group)
    optimizer = torch.optim.AdamW(model.parameters())
    segments = segments_of(model, group)
    mover(group, optimizer)(segments, uneven(2, 1))  # rank 1 has nothing
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if rank == 1:
            for segment in segments:
                for where in segment.tensors:
                    where.parameter.grad = None
        optimizer.step()
    before = everything_of(segments[:0], optimizer, group)
    assert rank == 0 or model[1].up.weight not in optimizer.state
    if rank == 1:  # what no other rank knows goes
        optimizer.state[model[1].up.bias] = {"old": 3, "older": torch.zeros(0, dtype=torch.float64)}
    mover(group, optimizer)(segments, home(2))
    assert before == {}
    assert set(optimizer.state[model[1].up.bias]) == {"step", "exp_avg", "exp_avg_sq"}
    state = optimizer.state[model[1].up.weight]
    losses = train(model, optimizer, range(3, 5))
    first, second = gathered(
        group,
        ([(key, value.shape) for key, value in state.items()], state["step"].item(), [one.item() for one in losses]),
    )
    assert first == second
    assert first[1] == 5.0


@on_ranks(2)
def test_what_was_decided_and_remembered_of_other_columns_is_forgotten(rank, group):
    model = parallel_layers.block(group)
    segments = segments_of(model, group)
    down = model[1].down
    down.plan = LayerPlan.from_pruned(torch.tensor([0]), down.num_columns, imputation="same")
    down.last = LastGradients(torch.ones(1, 12), torch.ones(8, 12))
    model[0].out.last = LastGradients(torch.ones(1), torch.ones(1))
    mover(group, None)(segments, {"1.down": uneven(2)["1.down"]})
    assert down.plan is None and down.last == LastGradients()
    assert model[0].out.last.dx_TK is not None  # nothing of it has moved


@on_ranks(3)
def test_blocks_of_one_weight_and_frozen_parameters(rank, group):
    """q, k and v one after another in one weight: [3 · units · rows, K]."""

    layer = torch.nn.Module()
    whole = torch.arange(3 * 6 * 2 * 4, dtype=torch.float32).view(3, 6, 2, 4)
    home = OwnershipMap.home(6, 3)
    layer.qkv = torch.nn.Parameter(whole[:, home.units_of(rank)].reshape(-1, 4), requires_grad=False)
    tensors = (UnitTensor(layer, "qkv", "qkv", 0, (2, 2, 2)),) * 2  # named twice: counts once
    segment = OwnedSegment("s", "heads", ("qkv",), tensors, home)
    units_seen = []
    segment.on_change = units_seen.append
    for owners in ([2, 0, 0, 1, 1, 2], [1] * 6, [0, 1, 2, 0, 1, 2]):
        after = OwnershipMap(np.array(owners), 3)
        mover(group, None)([segment], {"s": after})
        assert torch.equal(layer.qkv, whole[:, after.units_of(rank)].reshape(-1, 4))
        assert not layer.qkv.requires_grad
        assert units_seen[-1] == [unit for unit, owner in enumerate(owners) if owner == rank]


@on_ranks(2)
def test_a_copy_of_a_layer_with_as_many_units_as_at_home_but_others_is_not_at_home(rank, group):
    model = parallel_layers.block(group)
    segments = segments_of(model, group)
    targets = {name: OwnershipMap(owned.owners[::-1].copy(), 2) for name, owned in home(2).items()}
    layers = [each for each in model.modules() if isinstance(each, BalancedLinear)]
    for segment in segments:
        for where in segment.tensors:
            where.owner.segment = segment
    copy.deepcopy(layers[0]).require_home("a call of")
    mover(group, None)(segments, targets)
    for layer in copy.deepcopy(layers):
        assert layer.local_weight.shape == layer.home_shape and layer.segment is None
        with pytest.raises(RuntimeError, match=r"a call of .*, whose units are away"):
            layer.require_home("a call of")


@on_ranks(2)
def test_nothing_travels_where_nothing_changes(rank, group):
    model = parallel_layers.block(group)
    segments = segments_of(model, group)
    before, _ = held(segments, None)
    report = mover(group, None)(segments, home(2))
    assert held(segments, None)[0] == before
    assert (report.sent_bytes, report.num_rounds, report.new_bytes) == (0, 0, 0)
