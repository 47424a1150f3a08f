"""Which layers stages should have, what that would save, and what it would take; pure, the same on every rank.

``L`` layers, ``S`` stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from zeroresize.plan.partition import LayerTransfer, Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.rental import MIN_SAVING
from zeroresize.policy.pipeline.centralized import balanced_partition
from zeroresize.policy.pipeline.layer_costs import LayerCosts
from zeroresize.policy.pipeline.message_delays import PipelineMessages, step_delays
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad
from zeroresize.policy.pipeline.profiles import PipelineProfile
from zeroresize.policy.pipeline.shortest_step import shortest_partition
from zeroresize.runtime.schedules import Schedule
from zeroresize.runtime.simulated_steps import PipelineStep, simulated_step
from zeroresize.utils.value_checks import at_least, number, one_of

By = Literal["time", "parameters"]


@dataclass(frozen=True)
class RebalancingProposal:
    """Describe what other boundaries would change. Seconds are those of one profiled block.

    Attributes:
        before, after: [S + 1] boundaries; equal where nothing is to be gained.
        stage_s: [S] seconds that stages compute before.
        step_s, expected_step_s: before and after, simulated from the layers' seconds, and from those of messages
            where they are measured.
        bubble_ratio, expected_bubble_ratio: of these steps, the mean of the stages.
        measured_bubble_ratio: of the profiled block.
        num_bytes: that the busiest rank sends or receives.
        price_s: of the move there and back.
        is_needed: whether a stage is now over its memory limit.
        reason: why layers move, or do not move now; nothing where none was decided.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    stage_s: tuple[float, ...]
    step_s: float
    expected_step_s: float
    bubble_ratio: float
    expected_bubble_ratio: float
    measured_bubble_ratio: float
    num_bytes: float
    price_s: float
    is_needed: bool
    reason: str = ""

    @property
    def saving_s(self) -> float:
        """Return by how many seconds a step would be shorter."""
        return self.step_s - self.expected_step_s

    @property
    def transfers(self) -> tuple[LayerTransfer, ...]:
        """Return the layers that would move."""
        return Partition(self.before).transfers_to(Partition(self.after))


@dataclass(frozen=True)
class RebalancingRule:
    """Say how wanted boundaries are found.

    Attributes:
        by: what is divided evenly: seconds, or bytes of parameters. The saving is always one of seconds.
        schedule, num_microbatches: of the pipeline.
        num_steps: over which a change pays; those until the next profile.
        min_saving: share of a step below which nothing changes.
        memory_limits: [S] bytes; None for none.
        messages: between stages; None where they take no time. Stages wait for them
            (:mod:`~zeroresize.policy.pipeline.message_delays`).

    Raises:
        ValueError: for values that are not allowed.
    """

    by: By
    schedule: Schedule
    num_microbatches: int
    num_steps: int
    min_saving: float = MIN_SAVING
    memory_limits: tuple[float, ...] | None = None
    messages: PipelineMessages | None = None

    def __post_init__(self) -> None:
        one_of("by", self.by, get_args(By))
        at_least("profile_every", self.num_steps, 1)
        number("min_saving", self.min_saving, least=0.0, below=1.0)

    def propose(
        self,
        costs: LayerCosts,
        profile: PipelineProfile,
        cost_of_move: MoveCost,
        wanted: Partition | None = None,
    ) -> RebalancingProposal:
        """Return what the wanted boundaries would change; nothing where they save no more than noise.

        Args:
            costs: after ``profile``.
            profile: the newest one.
            wanted: boundaries that fit into the memory limits; None for those that divide best.

        Raises:
            ValueError: if no boundaries fit into the memory limits.
        """
        proposal = self.to(costs, profile, cost_of_move, wanted or self.wanted(costs, profile))
        if proposal.is_needed or proposal.saving_s > self.min_saving * proposal.step_s:
            return proposal
        return self.to(costs, profile, cost_of_move, Partition(profile.boundaries))

    def to(
        self, costs: LayerCosts, profile: PipelineProfile, cost_of_move: MoveCost, wanted: Partition
    ) -> RebalancingProposal:
        """Return what these boundaries would change, whatever they save; arguments as of :meth:`propose`."""
        now = Partition(profile.boundaries)
        before = self.simulated(costs, now)
        after = before if wanted == now else self.simulated(costs, wanted)
        num_bytes = profile.bytes_of(now.transfers_to(wanted))
        of_time = PipelineLoad.of(costs.seconds, now.num_stages, speeds=costs.speeds)
        return RebalancingProposal(
            now.boundaries,
            wanted.boundaries,
            tuple(of_time.stage_times(now).tolist()),
            before.step_s,
            after.step_s,
            before.bubble_ratio,
            after.bubble_ratio,
            profile.bubble_ratio,
            num_bytes,
            0.0 if wanted == now else cost_of_move.there_and_back(num_bytes),
            not self.load(costs, profile).fits(now),
        )

    def saving_s(self, costs: LayerCosts, now: Partition, wanted: Partition) -> float:
        """Return by how many seconds a step would be shorter with the wanted boundaries."""
        return self.simulated(costs, now).step_s - self.simulated(costs, wanted).step_s

    def wanted(self, costs: LayerCosts, profile: PipelineProfile) -> Partition:
        """Return the boundaries that divide best, whatever they save; arguments and errors as of :meth:`propose`."""
        now, load = Partition(profile.boundaries), self.load(costs, profile)
        if self.by != "time":
            return balanced_partition(load)
        forward_s, backward_s = (
            np.array(seconds) / self.num_microbatches for seconds in (costs.forward_s, costs.backward_s)
        )
        return shortest_partition(
            load, forward_s, backward_s, self.num_microbatches, self.schedule, self._messages_of(now.num_stages)
        )

    def load(self, costs: LayerCosts, profile: PipelineProfile, num_left: int | None = None) -> PipelineLoad:
        """Return what is divided evenly, and what must fit.

        Stages keep as many micro-batches as ``num_left`` stages do.
        """
        messages, is_of_time = self._messages_of(len(costs.speeds)), self.by == "time"
        delays = None
        if messages is not None and is_of_time:
            now = Partition(profile.boundaries)
            delays = step_delays(messages.seconds(now), self.num_microbatches, self.schedule)
        return PipelineLoad.of(
            costs.seconds if is_of_time else [float(one.weight_bytes) for one in profile.layers],
            len(costs.speeds),
            speeds=costs.speeds,
            delays=delays,
            layer_bytes=None if self.memory_limits is None else self.held_bytes(profile, num_left),
            memory_limits=self.memory_limits,
        )

    def held_bytes(self, profile: PipelineProfile, num_left: int | None = None) -> list[float]:
        """Return [L] bytes of each layer on the stage that keeps activations of most micro-batches."""
        num_stages = num_left or len(profile.boundaries) - 1
        kept = self.num_microbatches if self.schedule == "gpipe" else min(num_stages, self.num_microbatches)
        return [float(one.bytes_at_rest + kept * one.activation_bytes) for one in profile.layers]

    def simulated(self, costs: LayerCosts, partition: Partition) -> PipelineStep:
        """Simulate a step with the messages of :attr:`messages`, if these are of so many stages, else without."""
        forward_s, backward_s = (
            (
                PipelineLoad.of(seconds, partition.num_stages, speeds=costs.speeds).stage_times(partition)
                / self.num_microbatches
            ).tolist()
            for seconds in (costs.forward_s, costs.backward_s)
        )
        messages = self._messages_of(partition.num_stages)
        return simulated_step(
            forward_s,
            backward_s,
            self.num_microbatches,
            schedule=self.schedule,
            communication_s=0.0 if messages is None else messages.seconds(partition),
        )

    def _messages_of(self, num_stages: int) -> PipelineMessages | None:
        """Those of the pipeline, unless it is asked about one of fewer stages."""
        return self.messages if self.messages is not None and self.messages.are_between(num_stages) else None


def described(transfers: Sequence[LayerTransfer]) -> str:
    """Return a text such as "layers 7 and 8 move from stage 2 to 1, layer 3 from 1 to 0"."""
    layers: dict[tuple[int, int], list[int]] = {}
    for transfer in transfers:
        layers.setdefault((transfer.source, transfer.destination), []).append(transfer.layer)
    texts: list[str] = []
    for (source, destination), numbers in layers.items():
        listed = f"{numbers[0]}" if len(numbers) == 1 else f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
        verb = "" if texts else "moves " if len(numbers) == 1 else "move "
        stage = "" if texts else "stage "
        texts.append(f"layer{'s' * (len(numbers) > 1)} {listed} {verb}from {stage}{source} to {destination}")
    return ", ".join(texts)
