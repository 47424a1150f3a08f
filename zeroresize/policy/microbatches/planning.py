"""Plans one iteration: micro-batches, replicas, schedule, messages; proven free of deadlock (DynaPipe).

``N`` samples, ``A`` lengths of each, ``D`` replicas, ``S`` stages, ``M`` micro-batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zeroresize.policy.microbatches.baselines import of_equal_tokens, of_fixed_size, packed
from zeroresize.policy.microbatches.grid_costs import LongerThanMeasuredError
from zeroresize.policy.microbatches.iteration_plan import IterationPlan, ReplicaPlan
from zeroresize.policy.microbatches.micro_batch import Indices, MicroBatch, MicroBatchCosts, shapes_of
from zeroresize.policy.microbatches.planned_micro_batches import planned_micro_batches
from zeroresize.policy.microbatches.planning_options import DoesNotFitError, PlanningOptions
from zeroresize.policy.microbatches.replicas import replica_plans
from zeroresize.policy.microbatches.sample_order import ordered
from zeroresize.runtime.check import check

#: Of so many choices of micro-batches, the best with their order as it is, clusters are permuted.
_PERMUTED = 3


def plan_iteration(
    iteration: int,
    lengths_NA: Indices,
    costs: Mapping[str, MicroBatchCosts],
    options: PlanningOptions,
    *,
    model: str = "",
) -> IterationPlan:
    """Return the plan of one iteration.

    Each way of recomputation is planned for; of those that fit, the one whose iteration is shortest is taken, so memory
    is spent where it saves time (DynaPipe, section 7, dynamic recomputation). Every plan is checked before it is
    returned.

    Args:
        lengths_NA: tokens of the samples, in their order in the mini-batch.
        costs: by the names of what is computed again.
        model: fingerprint of what the plan is for.

    Raises:
        ValueError: for no samples, lengths below 1, costs of nothing, and a sample that is longer than what was
            measured, naming it.
        DoesNotFitError: for a sample that does not fit, naming it and the limit, or micro-batches of a fixed size that
            do not.
    """
    lengths = np.asarray(lengths_NA, dtype=np.int64)
    _require_samples(iteration, lengths)
    if not costs:
        raise ValueError("costs of no way of recomputation are given: at least one is needed")
    _require_measured(iteration, lengths, costs)
    choices: list[_Choice] = []
    failure: DoesNotFitError | None = None
    for recomputation, of_way in costs.items():
        try:
            choices = _with_those_of(lengths, recomputation, of_way, options, choices)
        except DoesNotFitError as error:
            failure = failure or error
        except ValueError as error:
            raise ValueError(f"iteration {iteration}: {error}") from error
    if not choices:
        raise DoesNotFitError(f"iteration {iteration}: {failure}") from failure
    permuted = [choice.with_clusters(costs[choice.recomputation], options) for choice in choices]
    chosen = min(permuted, key=lambda choice: choice.expected_s)
    for replica in chosen.replicas:
        if replica.microbatches:
            check(replica.stages, len(replica.microbatches))
    return IterationPlan(iteration, model, batch_fingerprint(lengths), chosen.recomputation, tuple(chosen.replicas))


def batch_fingerprint(lengths_NA: Indices) -> str:
    """Return a digest of the samples' lengths in their order."""
    lengths = np.ascontiguousarray(lengths_NA, dtype="<i8")
    return hashlib.blake2b(repr(lengths.shape).encode() + lengths.tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class _Choice:
    """What is best so far, with the micro-batches of all replicas."""

    recomputation: str
    microbatches: Sequence[MicroBatch]
    replicas: Sequence[ReplicaPlan]

    @property
    def expected_s(self) -> float:
        return max(replica.expected_s for replica in self.replicas)

    def with_clusters(self, costs: MicroBatchCosts, options: PlanningOptions) -> _Choice:
        """The same with clusters of micro-batches in the best order, if that is better than theirs."""
        replicas = replica_plans(self.microbatches, costs, options) if options.num_clusters > 1 else None
        permuted = self if replicas is None else replace(self, replicas=replicas)
        return min(self, permuted, key=lambda choice: choice.expected_s)


def _with_those_of(
    lengths_NA: Indices, recomputation: str, costs: MicroBatchCosts, options: PlanningOptions, best: list[_Choice]
) -> list[_Choice]:
    """The best few of this way of recomputation and of those that are best so far, with their order as it is."""
    in_order = replace(options, num_clusters=1)
    fits = False
    for microbatches in _micro_batches(lengths_NA, costs, options):
        if len(best) == _PERMUTED and _least_s(microbatches, costs, options) >= best[0].expected_s:
            fits = True  # or not: it could not be better
            continue
        replicas = replica_plans(microbatches, costs, in_order)
        if replicas is not None:
            fits = True
            choices = [*best, _Choice(recomputation, microbatches, replicas)]
            best = sorted(choices, key=lambda choice: choice.expected_s)[:_PERMUTED]
    if not fits:
        raise DoesNotFitError(_why_not(microbatches, costs, options))
    return best


def _micro_batches(lengths_NA: Indices, costs: MicroBatchCosts, options: PlanningOptions) -> Iterator[list[MicroBatch]]:
    if options.method == "dynamic":
        yield from planned_micro_batches(lengths_NA, costs, options)
    elif options.method == "packing":
        yield packed(lengths_NA, options.row_lengths, options.size)
    else:
        make = of_fixed_size if options.method == "fixed" else of_equal_tokens
        yield make(lengths_NA, ordered(lengths_NA, options.order), options.size)


def _least_s(microbatches: Sequence[MicroBatch], costs: MicroBatchCosts, options: PlanningOptions) -> float:
    """No schedule is shorter: every stage has to do its work, which replicas share by their speeds."""
    prices = costs.prices(*shapes_of(microbatches))
    work_S = (prices.forward_s + prices.backward_s).sum(axis=0)
    return float((work_S / (1.0 / options.slowness_DS(costs.num_stages)).sum(axis=0)).max())


def _why_not(microbatches: Sequence[MicroBatch], costs: MicroBatchCosts, options: PlanningOptions) -> str:
    sizes, lengths_MA = shapes_of(microbatches)
    kept = costs.prices(sizes, lengths_MA).activation_bytes.max(axis=1)
    largest = int(kept.argmax())
    return (
        f"micro-batches by method={options.method!r} do not fit into memory_limit={options.memory_limit:.0f} bytes, or "
        f"were never measured: the largest, {sizes[largest]} rows of {lengths_MA[largest].tolist()} tokens, keeps "
        f"{kept[largest]:.0f} on a stage, and several are under way under schedule={options.schedule!r}"
    )


def _require_measured(iteration: int, lengths_NA: Indices, costs: Mapping[str, MicroBatchCosts]) -> None:
    alone = np.ones(len(lengths_NA), dtype=np.int64)
    for of_way in costs.values():
        try:
            of_way.prices(alone, lengths_NA)
        except LongerThanMeasuredError as error:
            raise ValueError(
                f"iteration {iteration}: sample {error.row} of {lengths_NA[error.row].tolist()} tokens is longer than "
                f"what was measured, at most {error.most}: measure costs up to the longest sample (longest= of "
                "ProfiledShapes), or cut or drop such samples"
            ) from error


def _require_samples(iteration: int, lengths_NA: Indices) -> None:
    if lengths_NA.ndim != 2 or not len(lengths_NA) or not lengths_NA.shape[1]:
        raise ValueError(
            f"iteration {iteration}: lengths of shape {lengths_NA.shape} are no samples: [samples, 1 or 2] are needed, "
            "with at least one sample"
        )
    short = np.flatnonzero((lengths_NA < 1).any(axis=1))
    if len(short):
        raise ValueError(
            f"iteration {iteration}: sample {short[0]} has lengths {lengths_NA[short[0]].tolist()}: at least 1 token "
            "each is needed"
        )
