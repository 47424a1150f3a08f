"""Micro-batches of ordered samples, replicas and schedules, against brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.microbatches.costs import Prices
from zeroresize.policy.microbatches.cuts import Segments, shortest_cuts
from zeroresize.policy.microbatches.planning import shared, shortest_schedule
from zeroresize.runtime.schedules import adaptive_orders, orders_of, peak_bytes
from zeroresize.runtime.simulated_steps import timeline


def segments_of(lengths, most_bytes=math.inf):
    """Micro-batches with a fixed part, tokens and attention; they keep a byte for each token."""
    lengths = np.asarray(lengths, dtype=np.int64)

    def prices(sizes, longest):
        longest = longest[:, 0]
        return 3.0 + sizes * (1e-2 * longest + 2e-5 * longest**2), (sizes * longest).astype(np.float64)[None]

    return Segments.of(lengths[:, None], prices, most_bytes)


def all_cuts(num_samples):
    for number in range(num_samples):
        for inner in itertools.combinations(range(1, num_samples), number):
            yield (*inner, num_samples)


def iteration_s(segments, ends, fill, num_replicas):
    seconds = [segments.seconds(begin, end) for begin, end in itertools.pairwise((0, *ends))]
    return fill * max(seconds) + sum(seconds) / num_replicas


SLOW = [1.0, 1.0, 3.0, 1.0]
problems = st.tuples(
    st.lists(st.integers(1, 900), min_size=1, max_size=9),
    st.sampled_from([0.0, 0.5, 3.0, 15.0]),
    st.sampled_from([1, 4]),
)


@given(problems)
def test_no_partition_of_an_order_is_shorter(problem):
    lengths, fill, num_replicas = problem
    segments = segments_of(lengths)
    best = min(iteration_s(segments, ends, fill, num_replicas) for ends in all_cuts(len(lengths)))
    exact = shortest_cuts(segments, fill, num_replicas, gap=0.0)
    assert exact.iteration_s(fill, num_replicas) == pytest.approx(best)
    assert exact.iteration_s(fill, num_replicas) == pytest.approx(iteration_s(segments, exact.ends, fill, num_replicas))
    near = shortest_cuts(segments, fill, num_replicas, gap=0.05)
    assert best - 1e-9 <= near.iteration_s(fill, num_replicas) <= best * 1.0527


@given(problems, st.floats(1.0, 4.0))
def test_micro_batches_keep_within_memory(problem, factor):
    lengths, fill, num_replicas = problem
    limit = factor * max(lengths)
    cuts = shortest_cuts(segments_of(lengths, limit), fill, num_replicas)
    for begin, end in itertools.pairwise((0, *cuts.ends)):
        assert (end - begin) * max(lengths[begin:end]) <= limit
    unlimited = shortest_cuts(segments_of(lengths), fill, num_replicas, gap=0.0)
    assert cuts.iteration_s(fill, num_replicas) >= unlimited.iteration_s(fill, num_replicas) - 1e-9
    assert not segments_of(lengths, 0.5 * max(lengths)).has_partition


@given(
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=7),
    st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=1, max_size=3),
)
def test_replicas_are_close_to_the_best_division(seconds, slowness):
    def slowest(parts):
        return max(factor * sum(seconds[each] for each in part) for factor, part in zip(slowness, parts, strict=True))

    parts = shared(seconds, slowness)
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(len(seconds)))
    best = min(
        slowest([[at for at, chosen in enumerate(of) if chosen == replica] for replica in range(len(slowness))])
        for of in itertools.product(range(len(slowness)), repeat=len(seconds))
    )
    assert slowest(parts) <= 1.5 * best * (1.0 + 1e-9)  # a bound that holds


def test_a_slow_replica_gets_less():
    seconds = np.random.default_rng(0).lognormal(0.0, 0.5, 60)
    times = [factor * seconds[part].sum() for factor, part in zip(SLOW, shared(seconds, SLOW), strict=True)]
    assert max(times) < 1.1 * min(times)


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 2**32))
def test_schedules_are_never_longer_than_1f1b_and_keep_within_memory(num_stages, num_microbatches, seed):
    random = np.random.default_rng(seed)
    forward_s, backward_s, kept = random.lognormal(0.0, 0.8, (3, num_microbatches, num_stages))
    limits = kept.max(axis=0) * random.uniform(1.0, 6.0)
    prices, limit = Prices(forward_s, backward_s, kept, 0.0 * kept), float(limits.min())
    if (kept > limit).any():
        assert shortest_schedule(prices, limit) is None
        return
    plain = orders_of("1f1b", num_stages, num_microbatches)
    chosen = shortest_schedule(prices, limit)
    assert chosen is not None  # one micro-batch at a time always fits
    assert (peak_bytes(chosen.orders, kept) <= limit * (1.0 + 1e-9)).all()
    assert chosen.peak_bytes == pytest.approx(peak_bytes(chosen.orders, kept))
    assert chosen.step_s == pytest.approx(timeline(chosen.orders, forward_s, backward_s).step_s)
    if (peak_bytes(plain, kept) <= limit).all():
        assert chosen.step_s <= timeline(plain, forward_s, backward_s).step_s * (1.0 + 1e-9)
    cyclic = adaptive_orders(kept, [limit] * num_stages)
    unpermuted = shortest_schedule(prices, limit, num_clusters=1)
    assert unpermuted is not None and unpermuted.step_s <= timeline(cyclic, forward_s, backward_s).step_s * (1 + 1e-9)
