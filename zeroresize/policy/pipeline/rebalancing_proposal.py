"""Which layers stages should have, what that would save, and what it would take; pure, the same on every rank.

``L`` layers, ``S`` stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from zeroresize.plan.partition import LayerTransfer, Partition
from zeroresize.policy.moves.least_saving import MIN_SAVING, is_saving
from zeroresize.policy.moves.move_cost import MoveCost, most_bytes
from zeroresize.policy.pipeline.bubbles import PipelineStep, simulated_step
from zeroresize.policy.pipeline.centralized import balanced_partition
from zeroresize.policy.pipeline.layer_costs import LayerCosts
from zeroresize.policy.pipeline.message_delays import PipelineMessages, step_delays
from zeroresize.policy.pipeline.pipeline_load import Floats, PipelineLoad
from zeroresize.policy.pipeline.profiles import PipelineProfile
from zeroresize.policy.pipeline.shortest_step import shortest_partition
from zeroresize.runtime.schedules import Schedule
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
        *,
        wanted: Partition | None = None,
    ) -> RebalancingProposal:
        """Return what the wanted boundaries would change.

        Args:
            costs: after ``profile``.
            profile: the newest one.
            wanted: boundaries that fit into the memory limits; None for those that divide best.

        Raises:
            ValueError: if no boundaries fit into the memory limits.
        """
        now = Partition(profile.boundaries)
        is_needed = not self.load(costs, profile).fits(now)
        wanted = wanted or self.wanted(costs, profile)
        before = self.simulated(costs, now)
        after = before if wanted == now else self.simulated(costs, wanted)
        if not is_needed and not is_saving(before.step_s - after.step_s, before.step_s, self.min_saving):
            wanted, after = now, before
        num_bytes = bytes_of_transfers(now.transfers_to(wanted), _moving_bytes(profile), now.num_stages)
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
            is_needed,
        )

    def measured_step_s(self, profile: PipelineProfile) -> float:
        """Return the seconds of a step, simulated from what the layers took where they were."""
        costs = LayerCosts.first(profile)
        return self.simulated(costs, Partition(profile.boundaries)).step_s

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


def _moving_bytes(profile: PipelineProfile) -> Floats:
    """[L] that travel with each layer."""
    return np.array([float(one.bytes_at_rest) for one in profile.layers])


def bytes_of_transfers(transfers: Sequence[LayerTransfer], layer_bytes: Floats, num_stages: int) -> float:
    """Return the bytes that the busiest stage sends or receives, by which a move is priced; layers have [L] bytes."""
    sent, received = np.zeros(num_stages), np.zeros(num_stages)
    for transfer in transfers:
        sent[transfer.source] += layer_bytes[transfer.layer]
        received[transfer.destination] += layer_bytes[transfer.layer]
    return most_bytes(sent.tolist(), received.tolist())
