"""Lengths like those of the slides' data sets: the shares that Table 3 tells, at any scale."""

import numpy as np
import pytest

from lm_examples.length_distributions import BOUNDS, DISTRIBUTIONS, LengthDistribution


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


@pytest.mark.parametrize(("bounds", "tokens"), [((1, 4), (1.0, 2.0)), ((1, 4, 4), (1.0, 2.0)), ((1, 4), (0.0,))])
def test_what_is_no_distribution_is_refused(bounds, tokens):
    with pytest.raises(ValueError, match=r"rise|one positive number"):
        LengthDistribution(bounds, tokens)
