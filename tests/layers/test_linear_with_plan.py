"""Parallel layers with plans against unsharded ones with masked weights."""

import torch
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import TOLERANCES, PrunedPair, bf16_autocast


@on_ranks(3)
def test_a_pruned_pair_equals_one_with_masked_weights(rank, group):
    for dtype in TOLERANCES:
        pair = PrunedPair(group, dtype)
        pair.assert_equals(pair.masked)
    pair = PrunedPair(group)
    with bf16_autocast():
        pair.assert_equals(pair.masked, precision=torch.bfloat16)


@on_ranks(2)
def test_evaluation_computes_in_full_and_training_prunes_again(rank, group):
    pair = PrunedPair(group, torch.float64)
    for _ in range(2):
        pair.model.eval()
        pair.assert_equals(pair.whole)
        pair.model.train()
        pair.assert_equals(pair.masked)
