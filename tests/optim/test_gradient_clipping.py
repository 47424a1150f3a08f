"""Clipping of a divided model is that of the undivided one, on every rank alike."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from helpers.parallel_layers import WIDTH, block, segments_of, uneven
from helpers.processes import for_each
from torch import nn

import zeroresize as zr
from zeroresize.resharding.units.moving_units import move_units

pytestmark = pytest.mark.same_ranks

MAX_NORM = 0.05


class Models:
    """A divided model, and the undivided one that it is."""

    def __init__(self, group):
        self.group = group
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self.divided, self.whole = block(group), block(alone)

    def backward(self, seed=0, scale=1.0):
        x = torch.randn(5, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for model in (self.divided, self.whole):
            model.zero_grad()
            (scale * model(x).square().sum()).backward()

    def move(self, targets, optimizer=None):
        segments = segments_of(self.divided, self.group)
        move_units(segments, targets, process_group=self.group, optimizer=optimizer)

    def replicated(self):
        """Of both models, what every rank holds as a whole: the last layer and the row-parallel biases."""
        names = [f"2.{kind}" for kind in ("weight", "bias")] + ["0.out.bias", "1.down.bias"]
        return [[dict(model.named_parameters())[name] for name in names] for model in (self.divided, self.whole)]


def bits(tensor):
    return tensor.detach().clone().view(torch.int64).tolist()


def test_the_norm_is_that_of_the_undivided_model_whoever_owns_which_units(run_ranks):
    @for_each([(1, None), (2.0, None), (2.0, False), (3.5, False), ("inf", None)])
    def clip(rank, group, norm_type, foreach):
        models, norms = Models(group), []
        for turn in (None, 0, 1):  # at home, unevenly, and with a rank that has nothing
            if turn is not None:
                models = Models(group)
                models.move(uneven(3, turn))
            models.backward()
            norm = zr.clip_grad_norm_(models.divided.parameters(), MAX_NORM, norm_type, foreach=foreach)
            expected = nn.utils.clip_grad_norm_(models.whole.parameters(), MAX_NORM, norm_type)
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
            assert expected > MAX_NORM
            for held, whole in zip(*models.replicated(), strict=True):
                torch.testing.assert_close(held.grad, whole.grad, rtol=1e-9, atol=1e-12)
            norms.append(bits(norm))
        return norms

    first, *others = run_ranks(clip, 3)
    assert others == [first, first]


def test_training_with_clipping_is_that_of_the_undivided_model_and_replicas_stay_alike(run_ranks):
    def train(rank, group):
        models = Models(group)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (models.divided, models.whole)]
        for step in range(12):
            models.backward(step)
            zr.clip_grad_norm_(models.divided.parameters(), MAX_NORM)
            nn.utils.clip_grad_norm_(models.whole.parameters(), MAX_NORM)
            for optimizer in optimizers:
                optimizer.step()
            if step == 5:
                models.move(uneven(2), optimizers[0])
        for held, whole in zip(*models.replicated(), strict=True):
            torch.testing.assert_close(held, whole, rtol=1e-10, atol=1e-12)
        return [bits(own) for own in models.replicated()[0]]

    first, second = run_ranks(train, 2)
    assert first == second


def test_ranks_without_gradients_take_part_and_all_raise_where_one_is_infinite_and_scale_nothing(run_ranks):
    def clip(rank, group):
        models = Models(group)
        models.backward()
        if rank == 1:
            models.divided.zero_grad()
        norm = zr.clip_grad_norm_(models.divided.parameters(), math.inf).item()
        if rank == 0:  # whose gradients count where all ranks hold a parameter
            torch.testing.assert_close(
                norm, nn.utils.get_total_norm([g.grad for g in models.divided.parameters()]).item()
            )
        models.backward()
        if rank == 1:
            models.divided[1].up.weight.grad[0, 0] = math.inf
        before = copy.deepcopy([one.grad for one in models.divided.parameters()])
        with pytest.raises(RuntimeError, match=r"norm of order 2\.0 of the gradients is inf"):
            zr.clip_grad_norm_(models.divided.parameters(), MAX_NORM, error_if_nonfinite=True)
        assert all(map(torch.equal, before, [one.grad for one in models.divided.parameters()]))
        assert zr.clip_grad_norm_(models.divided.parameters(), MAX_NORM).isinf()
        return norm

    first, second = run_ranks(clip, 2, timeout_s=20)
    assert first == second > 0.0


def test_without_parallel_layers_it_is_torchs():
    torch.manual_seed(0)
    layers = nn.Linear(5, 7), nn.Linear(5, 7)
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        layer(torch.ones(2, 5)).square().sum().backward()
    norms = [
        clip(layer.parameters(), 0.1)
        for clip, layer in zip((zr.clip_grad_norm_, nn.utils.clip_grad_norm_), layers, strict=True)
    ]
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(layers[0].weight.grad, layers[1].weight.grad)
    assert zr.clip_grad_norm_([], 1.0) == 0.0
    for key, value in (("norm_type", 0), ("norm_type", math.nan), ("max_norm", -1.0)):
        with pytest.raises(ValueError, match=f"^{key}={value!r} is not allowed"):
            zr.clip_grad_norm_(layers[0].parameters(), **{"max_norm": 1.0, key: value})
    assert zr.clip_grad_norm_(layers[0].weight, 1.0) == layers[0].weight.grad.norm()


def test_shards_that_others_have_marked_count_on_every_rank(run_ranks):
    def clip(rank, group):
        layer = block(group)[1]
        marked = nn.Parameter(torch.ones(2, dtype=torch.float64))
        marked.tensor_model_parallel = True
        marked.grad = torch.full((2,), 3.0 + rank, dtype=torch.float64)
        parameters = [*layer.parameters(), marked]
        with pytest.raises(ValueError, match="1 of 1 parameters are marked as shards, but none is of a parallel layer"):
            zr.clip_grad_norm_([marked], 1.0)
        return zr.clip_grad_norm_(parameters, math.inf).item()

    assert run_ranks(clip, 2) == [pytest.approx(math.sqrt(2 * 9 + 2 * 16))] * 2
