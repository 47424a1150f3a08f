"""Dropout whose mask follows the unit: the same on any rank, at any recomputation, and as random as torch's."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from zeroresize.layers.segment import OwnedSegment
from zeroresize.layers.unit_dropout import UnitDropout
from zeroresize.plan.ownership import OwnershipMap


def segment_of(owners, num_ranks=2):
    return OwnedSegment("fc2", "neurons", (), (), OwnershipMap(np.asarray(owners), num_ranks))


def dropout_of(segment, rank, p=0.5, dim=-1, seed=7):
    return UnitDropout(p, segment, rank, dim=dim, seed=seed)


@pytest.mark.parametrize(("dim", "each"), [(-1, 1), (-1, 3), (1, 1), (1, 2)])
def test_a_unit_keeps_its_mask_whoever_owns_it(dim, each):
    """And whatever the random state of its rank is."""

    def masks(owners):
        segment = segment_of(owners)
        whole = np.zeros((3, 5, 6, each, 5), bool) if dim == 1 else np.zeros((3, 4, 6, each), bool)
        for call in range(3):
            for rank in range(2):
                torch.manual_seed(100 * rank + call)
                layers[rank].segment = segment
                units = segment.owned.units_of(rank)
                shape = (3, len(units) * each, 5, 5) if dim == 1 else (3, 4, len(units) * each)
                x = torch.ones(shape)
                y = layers[rank](x)
                kept = (y != 0).numpy()
                assert y.shape == x.shape and set(y.unique().tolist()) <= {0.0, 2.0}
                if dim == 1:
                    whole[:, :, units] = kept.reshape(3, len(units), each, 5, 5).transpose(0, 3, 1, 2, 4)
                else:
                    whole[:, :, units] = kept.reshape(3, 4, len(units), each)
        return whole

    expected = None
    for owners in ([0, 0, 0, 1, 1, 1], [1, 0, 1, 0, 1, 0], [1] * 6, [1, 1, 1, 1, 1, 0]):
        layers = [dropout_of(segment_of(owners), rank, dim=dim) for rank in range(2)]
        actual = masks(owners)
        expected = actual if expected is None else expected
        np.testing.assert_array_equal(actual, expected)
    assert 0.2 < expected.mean() < 0.8


def test_masks_are_as_random_as_coins():
    """z-scores of what independent coins would give, over rows, columns, rectangles and calls."""
    layer = dropout_of(segment_of([0] * 256, 1), 0, p=0.25)
    masks = torch.stack([(layer(torch.ones(512, 256)) != 0).double() for _ in range(2)])
    coins = (masks - 0.75) / (0.75 * 0.25) ** 0.5
    first, second = coins
    rows, columns = first @ first.T / 256**0.5, first.T @ first / 512**0.5
    for products in (rows, columns):
        others = products[~torch.eye(len(products), dtype=bool)]
        assert others.std() == pytest.approx(1.0, abs=0.05) and others.abs().max() < 6.0
    rectangles = first[:256, :128] * first[256:, :128] * first[:256, 128:] * first[256:, 128:]
    for sample in (first, second, first * second, rectangles):
        assert abs(float(sample.mean()) * sample.numel() ** 0.5) < 4.0
    for sums in (first.mean(0) * 512**0.5, first.mean(1) * 256**0.5):
        assert sums.std() == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_masked_as_the_output(dtype):
    x = torch.randn(6, 8, dtype=dtype).requires_grad_()
    layer = dropout_of(segment_of([0] * 8, 1), 0, p=0.2)
    y = layer(x)
    y.backward(torch.ones_like(y))
    scale = torch.tensor(1.25, dtype=dtype)
    assert y.dtype == dtype and torch.equal(x.grad, torch.where(y == 0, 0.0, scale).to(dtype))
    torch.testing.assert_close(y, x.detach() * x.grad)


def test_what_drops_nothing_draws_nothing():
    state = torch.get_rng_state()
    x = torch.randn(3, 8)
    layer = dropout_of(segment_of([0] * 8, 1), 0)
    assert layer.eval()(x) is x and layer.num_calls == 0
    assert dropout_of(segment_of([0] * 8, 1), 0, p=0.0)(x) is x
    x.normal_(generator=torch.Generator())
    torch.set_rng_state(state)
    assert torch.equal(dropout_of(segment_of([0] * 8, 1), 0, p=1.0)(x), torch.zeros(3, 8))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_forward_has_the_same_mask(use_reentrant):
    layer = dropout_of(segment_of([0] * 8, 1), 0)
    inputs = [torch.ones(4, 8, requires_grad=True) for _ in range(3)]
    outputs = [checkpoint(lambda x: layer(x.exp()), x, use_reentrant=use_reentrant) for x in inputs]
    for x, y in zip(inputs[::-1], outputs[::-1], strict=True):  # as micro-batches in a pipeline
        y.sum().backward()
        assert torch.equal(x.grad != 0, y != 0)
    assert layer.num_calls == 3


def test_recomputation_from_another_random_state_is_an_error():
    layer = dropout_of(segment_of([0] * 8, 1), 0)
    x = torch.ones(4, 8, requires_grad=True)
    y = checkpoint(lambda x: layer(x.exp()), x, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(RuntimeError, match="preserve_rng_state=True"):
        y.sum().backward()


def test_mistakes_are_told():
    with pytest.raises(ValueError, match=r"p=1.5 is not allowed: a finite number at least 0 and at most 1"):
        dropout_of(segment_of([0, 1]), 0, p=1.5)
    with pytest.raises(
        ValueError, match="7 features in dimension -1, and this rank owns 4 units of the segment of fc2"
    ):
        dropout_of(segment_of([0] * 4, 1), 0)(torch.ones(2, 7))
