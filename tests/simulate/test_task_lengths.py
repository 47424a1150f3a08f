"""Lengths of many tasks are like those that the paper tells of."""

import numpy as np
import pytest

from lm_examples.task_lengths import FLAN_LIKE, draw_pairs, mini_batch_of_pairs


def test_cutting_later_leaves_as_many_more_tokens_as_in_the_paper():
    joined = draw_pairs(200_000, np.random.default_rng(0)).sum(axis=1)
    more = np.minimum(joined, 8192).sum() / np.minimum(joined, 512).sum()
    assert more == pytest.approx(1.132, abs=0.01)


def test_naive_padding_is_mostly_padding():
    random = np.random.default_rng(1)
    for _ in range(20):
        lengths = mini_batch_of_pairs(65536, 65536, random, joined=True)
        assert lengths.sum() < 0.2 * len(lengths) * lengths.max()


def test_mini_batches_have_the_tokens_that_are_asked_for():
    random = np.random.default_rng(2)
    for joined, limits in ((True, [512]), (False, [512, 100])):
        for num_tokens in (1, 700, 65536):
            lengths = mini_batch_of_pairs(num_tokens, 512, random, joined=joined, max_target=100)
            assert lengths.shape[1] == (1 if joined else 2) and (lengths >= 1).all() and (lengths <= limits).all()
            assert lengths.sum() >= num_tokens > lengths[:-1].sum()
    assert sum(kind.share for kind in FLAN_LIKE) == pytest.approx(1.0)
