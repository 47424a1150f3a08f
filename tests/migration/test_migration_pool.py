"""What autograd keeps of other ranks' columns: memory is used again when nobody needs it any more, and not before."""

import pytest
import torch
from helpers.parallel_layers import randn
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from zeroresize.migration.pool import Pool


def address(tensor):
    return tensor.untyped_storage().data_ptr()


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=60))
def test_copies_in_use_stay_as_they_are_and_the_pool_grows_with_their_number_only(actions):
    pool, in_use, most, largest = Pool(), [], 0, 0
    for value, (size, place) in enumerate(actions):
        if place < len(in_use):
            del in_use[place]
        source = torch.full((size,), float(value))
        in_use.append((source, pool.copy(source)))
        most, largest = max(most, len(in_use)), max(largest, 4 * size)
        assert pool.bytes_held <= most * largest
        assert all(torch.equal(copied, expected) for expected, copied in in_use)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_is_the_tensor_contiguous(dtype):
    pool = Pool()
    for shape in ((6, 8), (0, 8), (3, 4)):
        source = randn(*shape, dtype=dtype)[:, 1::2]
        copied = pool.copy(source)
        assert_close(copied, source, rtol=0, atol=0)
        assert copied.is_contiguous() and copied.dtype == dtype
        del copied
    assert pool.bytes_held == 6 * 4 * dtype.itemsize


@pytest.mark.parametrize(
    "remainder_of",
    [torch.Tensor.detach, lambda copied: copied[2:], lambda copied: copied.view(torch.int32).t()],
    ids=["detached", "part", "view"],
)
def test_whatever_is_left_of_a_copy_keeps_its_memory(remainder_of):
    """A detached tensor is what checkpointing keeps, when the copy and the node that saved it are gone."""
    pool, source = Pool(), randn(4, 6)
    remainder = remainder_of(pool.copy(source))
    first, second = address(remainder), address(pool.copy(source))
    assert first != second
    del remainder
    both = [pool.copy(source), pool.copy(source)]
    assert {address(copied) for copied in both} == {first, second}


def test_memory_that_is_too_small_makes_room():
    pool = Pool()
    for size in (10, 20, 30, 5):
        pool.copy(torch.zeros(size))
    assert pool.bytes_held == 4 * 30
    small, large = pool.copy(torch.zeros(5)), pool.copy(torch.zeros(30))
    assert pool.bytes_held == 2 * 4 * 30
    del small, large
    pool.clear()
    assert pool.bytes_held == 0


def test_a_copy_survives_the_pool():
    pool = Pool()
    copied = pool.copy(torch.ones(1000))
    pool.clear()
    others = [torch.zeros(1000) for _ in range(100)]
    assert copied.sum() == 1000 and len(others) == 100


def test_memory_that_inference_asked_for_is_used_in_training():
    pool = Pool()
    with torch.inference_mode():
        pool.copy(torch.zeros(10))
    weight = torch.ones(10, requires_grad=True)
    (weight * pool.copy(torch.full((10,), 3.0))).sum().backward()
    assert_close(weight.grad, torch.full((10,), 3.0))
    assert pool.bytes_held == 40


class _Scale(torch.autograd.Function):
    """y = x k with a copy of k, which backward needs."""

    @staticmethod
    def forward(ctx, x, k, pool):
        copied = pool.copy(k)
        ctx.save_for_backward(copied)
        return x * copied

    @staticmethod
    def backward(ctx, dy):
        (copied,) = ctx.saved_tensors
        return dy * copied, None, None


@pytest.mark.parametrize(
    ("reentrant", "retains"), [(None, False), (None, True), (False, False), (False, True), (True, False)]
)
def test_a_backward_finds_what_its_forward_or_its_recomputation_kept(reentrant, retains):
    """Two forwards before their backwards, one more that no backward follows, and backwards that come twice."""
    pool, held = Pool(), []

    def run(x, factors):
        for factor in factors:
            k = torch.full((6,), factor)
            body = lambda x, k=k: _Scale.apply(_Scale.apply(x, k, pool), k + 1, pool)  # noqa: E731
            x = body(x) if reentrant is None else checkpoint(body, x, use_reentrant=reentrant)
        return x.sum()

    for _ in range(3):
        x = torch.ones(6, requires_grad=True)
        losses = [run(x, factors) for factors in ((2.0, 4.0), (6.0, 8.0), (10.0, 12.0))][::2]
        for is_last in (not retains, True)[: 1 + retains]:
            for loss, expected in zip(losses, (2 * 3 * 4 * 5, 10 * 11 * 12 * 13), strict=True):
                x.grad = None
                loss.backward(retain_graph=not is_last)
                assert_close(x.grad, torch.full((6,), float(expected)))
        del losses, loss
        held.append(pool.bytes_held)
    assert held == held[:1] * 3
