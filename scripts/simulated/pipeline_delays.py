"""What if links change: a pipeline whose divisions know, or do not know, what messages between stages take.

``N`` steps, ``L`` layers, ``S`` stages, ``C`` cases. As in training, a step is measured, its figures are known at the
end of the next one, and layers move while the step behind that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from scripts.simulated.diffusion import Method, diffused_partition
from scripts.simulated.pipeline_training import TYPICAL_LINKS, LayerLoads, PipelineTrace
from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.ski_rental import SkiRental
from zeroresize.policy.pipeline.centralized import balanced_partition
from zeroresize.policy.pipeline.message_delays import PipelineMessages, step_delays
from zeroresize.policy.pipeline.pipeline_load import Floats, PipelineLoad
from zeroresize.policy.pipeline.rebalancing_proposal import bytes_of_transfers
from zeroresize.policy.pipeline.running_links import RunningLinks
from zeroresize.policy.pipeline.shortest_step import shortest_partition
from zeroresize.policy.pipeline.simulated_steps import simulated_steps, stage_sums

#: What of messages a division knows: nothing; what activations travel from a stage to the next one, or on to the last
#: one (DynPipe's supplement, D.2, in its two readings); half of what travels on both sides of a stage, as measured last
#: or by running means.
Messages = Literal["ignored", "sent", "arrival", "newest", "running"]

#: Steps from a measured one to the first one with the layers where it wants them.
_LAG = 3
_WANTED = "wanted"


@dataclass(frozen=True)
class DelayRule:
    """Say how divisions are found.

    Attributes:
        messages: what is known of them.
        method: diffusion between neighbours, or the exact partition.
        every: steps from one measured step to the next.
        cost_of_move: what a move takes; layers move when staying has cost as much there and back (ski rental).

    Raises:
        ValueError: for values that are not allowed.
    """

    messages: Messages = "running"
    method: Method = "diffusion"
    every: int = 20
    cost_of_move: MoveCost = TYPICAL_LINKS

    def __post_init__(self) -> None:
        if self.messages not in get_args(Messages) or self.method not in get_args(Method) or self.every < 1:
            raise ValueError(
                f"messages={self.messages!r}, method={self.method!r}, every={self.every} are not allowed: there are "
                f"{get_args(Messages)}, {get_args(Method)}, and every from 1 on"
            )

    def load(self, layer_s: Floats, message_s: Sequence[float], num_microbatches: int) -> PipelineLoad:
        """Return what is to be even.

        Args:
            layer_s: [L] seconds of a step.
            message_s: [S − 1] seconds of a message between two stages, in each direction.
        """
        num_stages = len(message_s) + 1
        if self.messages in ("sent", "arrival"):
            charged_s = np.cumsum(message_s[::-1])[::-1] if self.messages == "arrival" else np.array(message_s)
            return replace(PipelineLoad.of(layer_s, num_stages), waits=num_microbatches * np.append(charged_s, 0.0))
        delays = None if self.messages == "ignored" else step_delays(message_s, num_microbatches, "1f1b")
        return PipelineLoad.of(layer_s, num_stages, delays=delays)

    def wanted(self, load: PipelineLoad, now: Partition) -> Partition:
        """Return the wanted division, whatever it saves."""
        return diffused_partition(load, now).partition if self.method == "diffusion" else balanced_partition(load)


def simulate_delays(
    loads: LayerLoads,
    message_s: Floats,
    boundaries: Sequence[int],
    *,
    num_microbatches: int,
    rule: DelayRule | None = None,
) -> PipelineTrace:
    """Train ``N`` steps of 1F1B.

    Args:
        message_s: [N, S − 1] seconds of a message between two stages, in each direction.
        boundaries: [S + 1] to begin with.
        rule: None for a static pipeline.

    Raises:
        ValueError: for boundaries, seconds or micro-batches that do not fit.
    """
    _check(loads, message_s)
    now = Partition.of(boundaries, loads.forward_s.shape[1], message_s.shape[1] + 1)
    layer_s = num_microbatches * (loads.forward_s + loads.backward_s)
    rental, running = SkiRental(), RunningLinks(0.0)
    coming: dict[int, Partition] = {}
    in_force, move_s, num_moves = [], 0.0, 0
    for step in range(len(message_s)):
        now = coming.pop(step, now)
        in_force.append(now.boundaries)
        if rule is None or step % rule.every or coming:
            continue
        links = tuple(MoveCost(0.0, seconds) for seconds in message_s[step].tolist())
        if rule.messages == "running":
            links = running.after(links)
        load = rule.load(layer_s[step], [link.fixed_s for link in links], num_microbatches)
        wanted = rule.wanted(load, now)
        num_bytes = bytes_of_transfers(now.transfers_to(wanted), loads.layer_bytes, now.num_stages)
        rental.charge({_WANTED: load.slowest(now) - load.slowest(wanted)}, rule.every)
        if wanted != now and rental.is_due(_WANTED, rule.cost_of_move.there_and_back(num_bytes)):
            rental.settle()
            coming[step + _LAG] = wanted
            move_s, num_moves = move_s + rule.cost_of_move.seconds(num_bytes), num_moves + 1
    return _trace(loads, message_s, in_force, num_microbatches, move_s, num_moves)


def simulate_delays_oracle(loads: LayerLoads, message_s: Floats, *, num_microbatches: int) -> PipelineTrace:
    """Train ``N`` steps of 1F1B, in each with the best division for its work and its messages, reached for nothing.

    Best is as good as search finds it: the division whose slowest stage is fastest, refined by simulated steps.

    Raises:
        ValueError: as :func:`simulate_delays`.
    """
    _check(loads, message_s)
    best: dict[bytes, tuple[int, ...]] = {}
    in_force = []
    for forward_s, backward_s, of_step in zip(loads.forward_s, loads.backward_s, message_s, strict=True):
        key = np.concatenate((forward_s, backward_s, of_step)).tobytes()
        if key not in best:
            best[key] = _best_division(forward_s, backward_s, of_step, num_microbatches).boundaries
        in_force.append(best[key])
    return _trace(loads, message_s, in_force, num_microbatches, 0.0, 0)


def _best_division(forward_s: Floats, backward_s: Floats, message_s: Floats, num_microbatches: int) -> Partition:
    """Of one step; [L], [L] and [S − 1] seconds."""
    load = DelayRule("newest").load(num_microbatches * (forward_s + backward_s), message_s.tolist(), num_microbatches)
    links = tuple(MoveCost(0.0, seconds) for seconds in message_s.tolist())
    messages = PipelineMessages(links, (0.0,) * (len(forward_s) + 1))
    return shortest_partition(load, forward_s, backward_s, num_microbatches, "1f1b", messages)


def _trace(
    loads: LayerLoads,
    message_s: Floats,
    in_force: Sequence[tuple[int, ...]],
    num_microbatches: int,
    move_s: float,
    num_moves: int,
) -> PipelineTrace:
    forward_s, backward_s = (stage_sums(seconds, np.array(in_force)) for seconds in (loads.forward_s, loads.backward_s))
    steps_s = simulated_steps(forward_s, backward_s, num_microbatches, communication_s=message_s)
    bubble_ratios = 1.0 - num_microbatches * (forward_s + backward_s).mean(axis=1) / steps_s
    return PipelineTrace(
        tuple(steps_s.tolist()), tuple(bubble_ratios.tolist()), tuple(in_force), 0.0, move_s, num_moves
    )


def _check(loads: LayerLoads, message_s: Floats) -> None:
    if message_s.ndim != 2 or len(message_s) != len(loads.forward_s):
        raise ValueError(
            f"message_s {message_s.shape} is not of {len(loads.forward_s)} steps: wanted is [steps, stages − 1]"
        )
