"""Tokens attend to those in their bucket, and tiles without such pairs are not computed."""

import pytest
import torch
from helpers import language_models

from lm_examples.cases.sparse_attention import (
    SparseAttentionBlock,
    SparseAttentionConfig,
    hash_attention,
)
from lm_examples.gpt import Block


def model_of(**shape):
    return language_models.model_of(**({"context": 16} | shape))


@pytest.mark.parametrize("width", [1, 4, 12])
@pytest.mark.parametrize("num_buckets", [1, 3, 40])
def test_outputs_and_gradients_are_those_of_masked_dense_attention(num_buckets, width):
    torch.manual_seed(num_buckets)
    query, key, value = torch.randn(3, 5, 12, 4, dtype=torch.float64).requires_grad_().unbind()
    buckets = torch.randint(num_buckets, (2, 5, 12))
    outputs, num_tiles = hash_attention(query, key, value, *buckets, width)
    mask = (buckets[0][:, :, None] == buckets[1][:, None]) & torch.ones(12, 12, dtype=torch.bool).tril()
    scores = (query @ key.transpose(1, 2) / 2).masked_fill(~mask, -1e300)
    has_keys = mask.any(dim=-1, keepdim=True)
    expected = torch.where(has_keys, scores.softmax(dim=-1) @ value, 0.0)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(outputs)
    gradients = torch.autograd.grad(outputs, (query, key, value), dy)
    assert all(gradient.isfinite().all() for gradient in gradients)
    wanted = torch.autograd.grad(expected, (query, key, value), dy)
    torch.testing.assert_close(gradients, wanted, rtol=1e-12, atol=1e-12)
    assert num_buckets < 40 or not has_keys.all()
    num_rows = 12 // width
    if num_buckets == 1:
        assert num_tiles == 5 * num_rows * (num_rows + 1) // 2
    elif width == 1:
        assert num_tiles == mask.sum()


def test_with_one_bucket_a_block_is_dense():
    torch.manual_seed(0)
    model = model_of()
    dense = Block(model).double()
    block = SparseAttentionBlock(model, SparseAttentionConfig(num_buckets=1, block_size=4)).double()
    block.load_state_dict(dense.state_dict(), strict=False)
    x = torch.randn(3, 16, 8, dtype=torch.float64)
    torch.testing.assert_close(block(x), dense(x), rtol=1e-12, atol=1e-12)
    assert block.share_computed == pytest.approx(10 * 16 / 136)
    assert block.work == pytest.approx(1 + 2 * 8 * 24 / (16 * 12 * 64 + 2 * 8 * 136))


def test_only_needed_tiles_are_multiplied(monkeypatch):
    torch.manual_seed(0)
    model = model_of(context=64)
    products, plain = [], torch.Tensor.__matmul__

    def counted(left, right):
        if left.dim() == 3 and right.dim() == 3:
            products.append(left.shape.numel() * right.shape[-1])
        return plain(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", counted)
    work = []
    for num_buckets in (1, 4, 16):
        block = SparseAttentionBlock(model, SparseAttentionConfig(num_buckets=num_buckets, block_size=4))
        products.clear()
        block(torch.randn(2, 64, 8))
        hashes = 2 * 2 * 64 * 8 * (num_buckets // 2)
        dense = 2 * (64 * 12 * 64 + 2 * 8 * 65 * 32)
        assert block.work == pytest.approx((2 * 64 * 12 * 64 + sum(products) + hashes) / dense)
        work.append(sum(products))
    assert work[0] == 2 * 2 * 2 * 4 * 16 * 136 and work[2] < work[1] < 0.6 * work[0]


def test_the_hash_is_that_of_the_nearest_direction():
    torch.manual_seed(0)
    attention = SparseAttentionBlock(model_of(), SparseAttentionConfig(num_buckets=6, block_size=4)).attention
    directions = torch.cat([attention.rotations, -attention.rotations], dim=1).T
    x = torch.randn(2, 16, 4)
    expected = [[max(range(6), key=lambda one: float(token @ directions[one])) for token in group] for group in x]
    assert attention._buckets(x).tolist() == expected
