"""Lengths like those of the slides' data sets: the shares that Table 3 tells, at any scale."""

import numpy as np
import pytest

from lm_examples.length_distributions import BOUNDS, DISTRIBUTIONS
from lm_examples.task_lengths import FLAN_LIKE, draw_pairs, mini_batch_of_pairs


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("max_length", [32768, 2048])
def test_each_range_has_its_share_of_the_tokens(name, max_length):
    distribution = DISTRIBUTIONS[name]
    lengths = distribution.draw(400_000, max_length, np.random.default_rng(0))
    bounds = [bound * max_length / BOUNDS[-1] for bound in BOUNDS[1:-1]]
    tokens = np.bincount(np.searchsorted(bounds, lengths), weights=lengths)
    tolerance = 0.01 if max_length == BOUNDS[-1] else 0.06  # whole tokens are coarse for short sequences
    np.testing.assert_allclose(
        tokens / tokens.sum(), np.array(distribution.tokens) / sum(distribution.tokens), atol=tolerance
    )
    assert lengths.min() >= 1 and max_length * 0.99 <= lengths.max() <= max_length


def test_most_sequences_are_short_and_github_has_more_long_ones():
    crawl, github = (DISTRIBUTIONS[name].shares for name in ("commoncrawl", "github"))
    assert crawl[0] > 0.9 and (np.diff(crawl) < 0).all() and (github[1:] > crawl[1:]).all()


def test_cutting_later_leaves_as_many_more_tokens_as_in_the_paper():
    joined = draw_pairs(200_000, np.random.default_rng(0)).sum(axis=1)
    more = np.minimum(joined, 8192).sum() / np.minimum(joined, 512).sum()
    assert more == pytest.approx(1.132, abs=0.01)


def test_mini_batches_have_the_tokens_that_are_asked_for():
    random = np.random.default_rng(2)
    for joined, limits in ((True, [512]), (False, [512, 100])):
        for num_tokens in (1, 700, 65536):
            lengths = mini_batch_of_pairs(num_tokens, 512, random, joined=joined, max_target=100)
            assert lengths.shape[1] == (1 if joined else 2) and (lengths >= 1).all() and (lengths <= limits).all()
            assert lengths.sum() >= num_tokens > lengths[:-1].sum()
    assert sum(kind.share for kind in FLAN_LIKE) == pytest.approx(1.0)
