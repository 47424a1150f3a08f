"""Decentralised balancing: neighbouring stages even out their work, round after round.

``L`` layers, ``S`` stages. After DynPipe's supplement, Algorithm 2 and the
max-neighbour algorithm that its appendix B.3.2 analyses; by time or by parameters, whichever the costs of the load are.

Algorithm 2 as printed sends the least loaded layer of every overloaded rank to the least loaded rank of all, which
would tear stages apart, and reads ``loads`` where it means totals. Here layers cross one boundary at a time, those next
to it, and work gets to distant stages in relays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from scripts.simulated.exchanges import Exchanges, potential
from zeroresize.plan.partition import LayerTransfer, Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.layer_costs import LayerCosts
from zeroresize.policy.pipeline.pipeline_load import Floats, Indices, PipelineLoad
from zeroresize.policy.pipeline.profiles import PipelineProfile
from zeroresize.policy.pipeline.rebalancing_proposal import RebalancingProposal, RebalancingRule

#: How boundaries are found: the exact partition, or diffusion between neighbours.
Method = Literal["partition", "diffusion"]


@dataclass(frozen=True)
class Diffusion:
    """Describe where diffusion led, and how.

    Attributes:
        partition: the last one.
        potentials: [rounds + 1] φ before the first round and after each; see
            :func:`~scripts.simulated.exchanges.potential`.
        transfers: in the order in which they are made; each crosses one boundary. ``start.transfers_to(partition)``
            are those that are left if every layer travels straight to where it ends up.
        transfer_s: seconds that they take: rounds one after the other, boundaries of a round at once. 0 where the time
            of a transfer was not given.
    """

    partition: Partition
    potentials: tuple[float, ...]
    transfers: tuple[LayerTransfer, ...]
    transfer_s: float

    @property
    def num_rounds(self) -> int:
        """Return how many rounds were made."""
        return len(self.potentials) - 1


def diffused_partition(
    load: PipelineLoad,
    start: Partition,
    *,
    gamma: float = 0.0,
    transfer_s: Sequence[float] | Floats | None = None,
    num_steps: float | None = None,
) -> Diffusion:
    """Diffuse layers until φ is at most ``gamma``, or until nobody gains anything.

    In a round every stage deals with one neighbour at most and pairs with the largest gaps go first; a pair divides its
    layers anew, as evenly as it can. Where no pair can, overloaded stages try relays, in which every stage on the way
    to an underloaded one hands on some of its layers (:mod:`~scripts.simulated.exchanges`). φ never rises, nor
    does the time of the slowest stage.

    Where stages wait for messages, their times hold that, too: the gap between neighbours is one of computing and
    waiting (supplement, D.2; here both of them wait, :mod:`~zeroresize.policy.pipeline.message_delays`). What a stage
    waits stays the same as layers move, so a layer changes two times by as much as without messages, and φ falls as
    ever.

    With layers so small that pairs become equal, φ ≤ γ is reached within 3 S² ln(S² W / γ) rounds, W being the sum of
    the times: the first branch of the supplement's bound, without its log S. (A round's pairs hold a third of the
    squared gaps of all boundaries, these at least 4 / S² of Σ (x − mean)², and an evened pair takes half of its squared
    gap from that sum.) Its second branch, S W log S / γ, assumes that any two ranks may meet and does not hold for
    neighbours only: with all work on the last of 64 stages γ = W took 2,267 rounds, and S log S is 266.

    Whole layers end in a local optimum instead of φ = 0: the layers at every boundary cost at least the gap there, or
    memory or a last layer holds them back, as on a stage that waits for long, and no relay helps. It need not be the
    best partition, the less the fewer layers a stage has and the more devices differ.

    Args:
        load: of layers and stages; seconds a step if the time of transfers is to count.
        start: the partition in force.
        gamma: in the unit of φ.
        transfer_s: [L] seconds in which a layer crosses a boundary. Stages then hand over layers only if that saves
            the slowest of them more over ``num_steps`` than it takes. Rounds are left out from the end where they take
            longer than they make the slowest stage of all faster.
        num_steps: over which a transfer must pay.

    Raises:
        ValueError: if ``start`` is of other layers or stages or does not fit into the memory limits, if only one of
            ``transfer_s`` and ``num_steps`` is given, or one is negative.
    """
    load.check_partition(start)
    if not load.fits(start):
        stage = int(np.flatnonzero(load.stage_bytes(start) > load.memory_limits)[0])
        raise ValueError(
            f"stage {stage} holds {load.stage_bytes(start)[stage]:.0f} bytes at the start and may hold "
            f"{load.memory_limits[stage]:.0f}: divide the layers by balanced_partition"
        )
    exchanges = Exchanges(load, _crossing_sums(load, transfer_s, num_steps), num_steps or 0.0)
    partitions, spent_s = [np.array(start.boundaries)], [0.0]
    potentials = [potential(load.stage_times(start), load.speeds)]
    while potentials[-1] > gamma:
        now = partitions[-1]
        after = exchanges.pairs(now)
        if np.array_equal(after, now):
            after = exchanges.relays(now)
        if np.array_equal(after, now):
            break
        partitions.append(after)
        spent_s.append(spent_s[-1] + exchanges.seconds(now, after))
        potentials.append(potential(load.times_between(after), load.speeds))
    kept = len(partitions)
    if num_steps is not None:
        slowest_s = [float(load.times_between(own).max()) for own in partitions]
        kept = 1 + int(np.argmin(num_steps * np.array(slowest_s) + np.array(spent_s)))
    made = (_transfers(before, after) for before, after in itertools.pairwise(partitions[:kept]))
    last = Partition(tuple(partitions[kept - 1].tolist()))
    return Diffusion(last, tuple(potentials[:kept]), tuple(itertools.chain(*made)), spent_s[kept - 1])


class DiffusionRule(RebalancingRule):
    """Say how wanted boundaries are found: by diffusion from those in force, where these fit into the memory limits."""

    def propose(
        self,
        costs: LayerCosts,
        profile: PipelineProfile,
        cost_of_move: MoveCost,
        *,
        wanted: Partition | None = None,
    ) -> RebalancingProposal:
        """Return what the wanted boundaries would change, as :class:`RebalancingRule` does."""
        now, load = Partition(profile.boundaries), self.load(costs, profile)
        if wanted is None and load.fits(now):
            # What divides bytes of parameters cannot be weighed against seconds.
            is_of_time = self.by == "time"
            moving_bytes = np.array([float(layer.bytes_at_rest) for layer in profile.layers])
            transfer_s = moving_bytes * cost_of_move.seconds_per_byte if is_of_time else None
            num_steps = float(self.num_steps) if is_of_time else None
            wanted = diffused_partition(load, now, transfer_s=transfer_s, num_steps=num_steps).partition
        return super().propose(costs, profile, cost_of_move, wanted=wanted)


RULES: dict[Method, type[RebalancingRule]] = {"partition": RebalancingRule, "diffusion": DiffusionRule}


def _crossing_sums(load: PipelineLoad, transfer_s: Sequence[float] | Floats | None, num_steps: float | None) -> Floats:
    """[L + 1] seconds in which the first layers cross a boundary, none of them to all; zeros where not given."""
    if (transfer_s is None) != (num_steps is None):
        raise ValueError("transfer_s and num_steps are given together or not at all")
    if transfer_s is None or num_steps is None:
        return np.zeros(load.num_layers + 1)
    seconds = np.array(transfer_s, dtype=np.float64)
    if seconds.shape != (load.num_layers,) or not np.all(np.isfinite(seconds) & (seconds >= 0.0)):
        raise ValueError(f"transfer_s are not {load.num_layers} finite numbers of seconds, none negative")
    if not (math.isfinite(num_steps) and num_steps >= 0.0):
        raise ValueError(f"num_steps={num_steps} is not allowed: wanted is a finite number that is not negative")
    return np.concatenate([[0.0], np.cumsum(seconds)])


def _transfers(before: Indices, after: Indices) -> list[LayerTransfer]:
    """The layers between the old and the new place of each moved boundary.

    In such an order that a stage hands on its own layers before it gets others, so that it never holds more than
    before or after the round.
    """
    transfers = []
    for right in np.flatnonzero(after < before)[::-1].tolist():
        transfers += [
            LayerTransfer(layer, right - 1, right) for layer in range(int(before[right]) - 1, int(after[right]) - 1, -1)
        ]
    for right in np.flatnonzero(after > before).tolist():
        transfers += [LayerTransfer(layer, right, right - 1) for layer in range(int(before[right]), int(after[right]))]
    return transfers
