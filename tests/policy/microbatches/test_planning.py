"""Plans of whole iterations."""

import dataclasses
import math

import numpy as np
import pytest
from helpers.instruction_events import step_by_events
from hypothesis import given
from hypothesis import strategies as st

from lm_examples.microbatches.tasks import padding_efficiency
from zeroresize.plan.partition import Partition
from zeroresize.policy.microbatches.costs import StageCosts
from zeroresize.policy.microbatches.cuts import fill_of, of_equal_tokens, of_fixed_size, ordered, packed
from zeroresize.policy.microbatches.plan import DoesNotFitError, IterationPlan, MicroBatch, PlanningOptions, shapes_of
from zeroresize.policy.microbatches.planning import batch_fingerprint, plan_iteration
from zeroresize.runtime.instructions import Kind, check


class GrowingCosts:
    """Costs of a layer that grow with the tokens of a micro-batch and the squares of its lengths."""

    def __init__(self, factors):
        self.factors = factors

    def values(self, sizes_K, lengths_KA):
        columns = [np.ones(len(sizes_K)), *(sizes_K * lengths_KA.T), *(sizes_K * lengths_KA.T**2)]
        if lengths_KA.shape[1] == 2:
            columns.append(sizes_K * lengths_KA.prod(axis=1))
        return self.factors @ np.stack(columns).astype(np.float64)


def costs_of(num_stages=2, *, pairs=False, bytes_of_token=1.0, seconds=1.0):
    features = 6 if pairs else 3
    factors = np.zeros((4, features))
    factors[0, :3] = np.array([1e-3, 1e-5, 2e-8]) * seconds if not pairs else [1e-3, 1e-5, 1e-5]
    if pairs:
        factors[0, 3:] = 2e-8
    factors[1] = 2.0 * factors[0]
    factors[2, 1 : 3 if pairs else 2] = bytes_of_token
    kinds = ("block",) * (2 * num_stages)
    boundaries = Partition.uniform(len(kinds), num_stages).boundaries
    return StageCosts(kinds, {"block": GrowingCosts(factors)}, boundaries)


def lengths_of(seed, number=60, pairs=False):
    random = np.random.default_rng(seed)
    return np.ceil(random.lognormal(4.0, 1.0, (number, 2 if pairs else 1))).clip(1, 2000).astype(np.int64)


@given(
    st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.sampled_from([math.inf, 2.0, 6.0])
)
def test_plans_hold_every_sample_once_and_can_be_carried_out(seed, num_stages, num_replicas, pairs, factor):
    lengths = lengths_of(seed, 25, pairs)
    costs = costs_of(num_stages, pairs=pairs)
    limit = 4.0 * factor * float(lengths.sum(axis=1).max())
    plan = plan_iteration(3, lengths, {"none": costs}, PlanningOptions(num_replicas, limit))
    samples = [sample for replica in plan.replicas for each in replica.microbatches for sample in each.samples]
    assert sorted(samples) == list(range(len(lengths)))
    assert len(plan.replicas) == num_replicas and plan.iteration == 3
    for replica in plan.replicas:
        assert len(replica.stages) == num_stages
        if not replica.microbatches:
            assert not any(replica.stages)
            continue
        check(replica.stages, len(replica.microbatches))
        for each in replica.microbatches:
            assert each.lengths == tuple(lengths[list(each.samples)].max(axis=0).tolist())
        forward_s, backward_s, kept, _ = costs.prices(*shapes_of(replica.microbatches))
        assert replica.expected_s == pytest.approx(step_by_events(replica.stages, forward_s, backward_s))
        for stage, instructions in enumerate(replica.stages):
            held, most = 0.0, 0.0
            for kind, number in instructions:
                if kind.computes:
                    held += kept[number, stage] * (1.0 if kind is Kind.FORWARD else -1.0)
                    most = max(most, held)
            assert most <= limit * (1 + 1e-9) and replica.expected_bytes[stage] == pytest.approx(most)
    assert IterationPlan.from_json(plan.to_json()) == plan
    assert plan == plan_iteration(3, lengths, {"none": costs}, PlanningOptions(num_replicas, limit))


@pytest.mark.parametrize("seed", range(6))
def test_planned_micro_batches_are_no_slower_than_baselines(seed):
    lengths, costs = lengths_of(seed), {"none": costs_of(4)}
    dynamic = plan_iteration(0, lengths, costs, PlanningOptions())
    for method, sizes in (("fixed", (1, 2, 4, 8, 16)), ("tokens", (64, 256, 1024, 4096)), ("packing", (1, 2, 4))):
        for size in sizes:
            options = PlanningOptions(method=method, size=size, row_lengths=(2000,))
            assert dynamic.expected_s <= plan_iteration(0, lengths, costs, options).expected_s * 1.02


def test_what_fits_without_computing_again_is_not_computed_again():
    lengths = lengths_of(0)
    longest = float(lengths.max())
    costs = {"none": costs_of(), "layers": costs_of(bytes_of_token=0.1, seconds=1.3)}
    assert plan_iteration(0, lengths, costs, PlanningOptions()).recomputation == "none"
    assert plan_iteration(0, lengths, costs, PlanningOptions(memory_limit=1.5 * longest)).recomputation == "layers"


def test_replicas_and_stages_that_are_slow_count():
    lengths = lengths_of(1, 120)
    options = PlanningOptions(2, slowness=((1.0, 1.0), (2.0, 2.0)))
    plan = plan_iteration(0, lengths, {"none": costs_of(2)}, options)
    tokens = [sum(each.num_tokens for each in replica.microbatches) for replica in plan.replicas]
    assert tokens[1] < 0.7 * tokens[0]
    assert plan.replicas[1].expected_s == pytest.approx(plan.replicas[0].expected_s, rel=0.1)
    even = plan_iteration(0, lengths, {"none": costs_of(2)}, PlanningOptions(2))
    assert plan.expected_s < 2.0 * max(replica.expected_s for replica in even.replicas)
    with pytest.raises(ValueError, match="one number is needed for each of 2 stages"):
        plan_iteration(0, lengths, {"none": costs_of(2)}, PlanningOptions(slowness=((1.0,),)))
    slow_stage = plan_iteration(0, lengths, {"none": costs_of(2)}, PlanningOptions(slowness=((1.0, 3.0),)))
    assert slow_stage.expected_s > 2.0 * plan_iteration(0, lengths, {"none": costs_of(2)}, PlanningOptions()).expected_s
    assert fill_of(costs_of(4), lengths) == pytest.approx(3.0)
    assert fill_of(costs_of(4), lengths, np.array([1.0, 1.0, 3.0, 1.0])) == pytest.approx(1.0)


def test_fewer_samples_than_replicas_leave_some_with_nothing():
    plan = plan_iteration(0, np.array([[5], [7]]), {"none": costs_of(2)}, PlanningOptions(4))
    assert sorted(len(replica.microbatches) for replica in plan.replicas) == [0, 0, 1, 1]
    assert IterationPlan.from_json(plan.to_json()) == plan


def test_samples_that_are_alike_are_neighbours():
    lengths = lengths_of(2, 40, pairs=True)
    for order in (ordered(lengths), ordered(lengths, "tour")):
        assert sorted(order.tolist()) == list(range(40))

    def way(order):
        return np.abs(np.diff(lengths[order], axis=0)).sum()

    assert lengths[ordered(lengths), 0].tolist() == sorted(lengths[:, 0].tolist())
    assert way(ordered(lengths, "tour")) < way(ordered(lengths)) < way(np.arange(40))
    alike = np.array([[4, 4]] * 5 + [[9, 1]])
    assert sorted(ordered(alike, "tour").tolist()) == list(range(6))


def test_baselines_are_what_they_are_called():
    lengths = np.array([[6], [5], [4], [3], [9]])
    rows = packed(lengths, [10], 2)
    assert [each.rows for each in rows] == [((0, 2), (1, 3)), ((4,),)]
    assert all(each.lengths == (10,) for each in rows)
    assert padding_efficiency(rows, lengths) == pytest.approx(27 / 30)
    order = ordered(lengths)
    assert [each.lengths for each in of_fixed_size(lengths, order, 2)] == [(4,), (6,), (9,)]
    by_tokens = of_equal_tokens(lengths, order, 12)
    assert [each.samples for each in by_tokens] == [(3, 2), (1, 0), (4,)]
    assert all(each.num_tokens <= 12 for each in by_tokens)
    assert of_equal_tokens(lengths, order, 1) == [MicroBatch.of([sample], lengths) for sample in order]
    pairs = packed(np.array([[5, 1], [5, 8], [5, 3]]), [10, 9], 1)
    assert [each.rows for each in pairs] == [((0, 1),), ((2,),)]


SAMPLES_THAT_CANNOT_BE_PLANNED = (
    (np.zeros((0, 1), dtype=int), {}, ValueError, r"lengths of shape \(0, 1\) and type int64 are not allowed"),
    (np.array([[12.5]]), {}, ValueError, "type float64 are not allowed: whole numbers"),
    (np.array([[math.nan]]), {}, ValueError, "type float64 are not allowed"),
    ([[3, 4], [5, 6]], {}, ValueError, "lengths have 2 columns: costs are of"),
    ([3, 4], {}, ValueError, r"lengths of shape \(2,\)"),
    (None, {}, ValueError, "type object are not allowed"),
    ("ab", {}, ValueError, "not allowed"),
    (np.array([[3], [0]]), {}, ValueError, r"sample 1 has lengths \[0\]: at least 1"),
    (np.array([[3], [900]]), {"memory_limit": 500.0}, DoesNotFitError, r"sample 1 of \[900\] tokens keeps more than"),
    (
        np.full((8, 1), 100),
        {"memory_limit": 500.0, "method": "fixed", "size": 8},
        DoesNotFitError,
        r"method='fixed' do not fit into memory_limit=500 bytes, .* the largest, 8 rows of \[100\] tokens",
    ),
    (np.array([[30]]), {"method": "packing", "row_lengths": (20,)}, ValueError, r"sample 0 has lengths \[30\]: rows"),
)


def test_samples_and_options_that_are_not_allowed_are_named():
    costs = dataclasses.replace(costs_of(), names=("rows", "tokens"))
    for lengths, options, error, message in SAMPLES_THAT_CANNOT_BE_PLANNED:
        with pytest.raises(error, match=f"iteration 7: .*{message}"):
            plan_iteration(7, lengths, {"none": costs}, PlanningOptions(**options))
    for options, message in (
        ({"num_replicas": 0}, "num_replicas"),
        ({"memory_limit": 0.0}, "memory_limit"),
        ({"method": "packing"}, "needs row_lengths"),
        ({"method": "magic"}, "method"),
        ({"schedule": "gpipe"}, "schedule"),
        ({"num_replicas": 2, "slowness": ((1.0,),)}, "for each of 2 replicas"),
        ({"slowness": ((0.0,),)}, "slowness"),
        ({"num_clusters": 7}, "num_clusters"),
    ):
        with pytest.raises(ValueError, match=message):
            PlanningOptions(**options)


def test_fingerprints_tell_batches_apart_and_broken_plans_are_no_plans():
    lengths = lengths_of(0, 5)
    prints = {batch_fingerprint(each) for each in (lengths, lengths[::-1], lengths + 1, lengths.reshape(1, 5))}
    assert len(prints) == 4
    for text in ("", "[]", "{}", '{"format": 1}'):
        with pytest.raises(ValueError, match="no plan"):
            IterationPlan.from_json(text)
    with pytest.raises(ValueError, match="format 99"):
        IterationPlan.from_json('{"format": 99}')
    with pytest.raises(ValueError, match="no way of recomputation"):
        plan_iteration(0, lengths, {}, PlanningOptions())
    with pytest.raises(ValueError, match="empty"):
        MicroBatch.of([], lengths)


def test_micro_batches_that_were_never_measured_are_refused_and_not_planned():
    class Measured:
        """Costs of micro-batches of up to 100 tokens."""

        num_stages = 2

        def prices(self, sizes_K, lengths_KA):
            prices = costs_of(2).prices(sizes_K, lengths_KA)
            is_larger = (sizes_K * lengths_KA[:, 0] > 100)[:, None]
            return type(prices)(*(np.where(is_larger, np.inf, values) for values in prices))

    lengths = np.full((12, 1), 40)
    plan = plan_iteration(0, lengths, {"none": Measured()}, PlanningOptions())
    assert [each.size for each in plan.replicas[0].microbatches] == [2] * 6
    with pytest.raises(DoesNotFitError, match="do not fit into memory_limit=inf bytes, or were never measured"):
        plan_iteration(0, lengths, {"none": Measured()}, PlanningOptions(method="fixed", size=3))


def test_a_stage_keeps_what_it_hands_on_as_the_next_layer_is_elsewhere():
    plain = costs_of(4)
    handed = ((2, "size", "length", 16), (1, "size", "length"))
    costs = StageCosts(plain.kinds, plain.costs, plain.boundaries, ("size", "length"), (handed,) * 7)
    sizes, lengths = np.array([3, 1]), np.array([[10], [100]])
    more = costs.prices(sizes, lengths).activation_bytes - plain.prices(sizes, lengths).activation_bytes
    assert more.tolist() == [[30.0 * 33] * 3 + [0.0], [100.0 * 33] * 3 + [0.0]]
    assert (costs.prices(sizes, lengths).workspace_bytes == plain.prices(sizes, lengths).workspace_bytes).all()
