"""What messages between neighbouring stages take, and how much of that they make a step longer; pure.

``C`` cases, ``L`` layers, ``S`` stages, ``M`` micro-batches.

DynPipe's supplement, D.2, adds what activations travel to the time of the stage that sends them, and compares that with
the next stage's time alone. In 1F1B gradients come back as often, and a stage that turns from a forward to a backward,
or back, waits until what it has sent has arrived (so does torch's schedule). Once the pipeline is full, the pace of a
stage is therefore what it computes and what it sends to both sides. By D.2 as printed steps mostly are longer than if
messages are ignored (``docs/results/pipeline_delays.md``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.pipeline_load import Floats, Indices
from zeroresize.runtime.schedules import Schedule

#: Of so many measurements the middle one counts: what varies from one to the next moves nothing.
_REMEMBERED = 5


@dataclass(frozen=True)
class PipelineMessages:
    """Describe the messages of a pipeline, whatever its boundaries are.

    Attributes:
        links: [S − 1] seconds of a message between two neighbours, in each direction, by its bytes.
        num_bytes: [L + 1] of one micro-batch before each layer and behind the last one, the mean of the activation and
            its gradient.

    Raises:
        ValueError: if the bytes are negative or not finite.
    """

    links: tuple[MoveCost, ...]
    num_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(0.0 <= size < math.inf for size in self.num_bytes):
            raise ValueError("the bytes of messages must be finite and not negative")

    def seconds(self, partition: Partition) -> tuple[float, ...]:
        """Return [S − 1] seconds of a message between two neighbours, in each direction, with these boundaries.

        That is the ``communication_s`` of :func:`~zeroresize.runtime.simulated_steps.simulated_step`.

        Raises:
            ValueError: if ``partition`` is of other layers or stages.
        """
        if (partition.num_stages - 1, partition.num_layers + 1) != (len(self.links), len(self.num_bytes)):
            raise ValueError(
                f"a partition of {partition.num_layers} layers over {partition.num_stages} stages has other boundaries "
                f"than messages of {len(self.num_bytes) - 1} layers over {len(self.links) + 1}"
            )
        (seconds,) = self.seconds_between(np.array([partition.boundaries]))
        return tuple(seconds.tolist())

    def seconds_between(self, boundaries: Indices) -> Floats:
        """Return [C, S − 1] what :meth:`seconds` does, for many boundaries [C, S + 1] of these layers and stages."""
        per_byte_s = np.array([link.seconds_per_byte for link in self.links])
        fixed_s = np.array([link.fixed_s for link in self.links])
        return np.array(self.num_bytes)[boundaries[:, 1:-1]] * per_byte_s + fixed_s

    def are_between(self, num_stages: int) -> bool:
        """Whether they are those of so many stages."""
        return len(self.links) == num_stages - 1


def step_delays(communication_s: Sequence[float], num_microbatches: int, schedule: Schedule) -> tuple[float, ...]:
    """Return [S − 1] seconds of a step in which stages wait for the messages over each boundary.

    Both directions and all micro-batches together: the ``delays`` of
    :meth:`~zeroresize.policy.pipeline.pipeline_load.PipelineLoad.of`. In 1F1B nothing is computed while a message
    travels, beside those that fill and drain the pipeline. In GPipe stages compute the next micro-batch meanwhile, and
    where they do not keep up with the link, no other division of layers does either.

    Args:
        communication_s: [S − 1] seconds of a message, in each direction.
        num_microbatches: M.
    """
    num_waited_for = 2 * num_microbatches if schedule == "1f1b" else 0
    return tuple(num_waited_for * seconds for seconds in communication_s)


class RunningLinks:
    """Say what the same links take by now, of measurements that vary: the middle one of the last five."""

    def __init__(self) -> None:
        self._measured: deque[Floats] = deque(maxlen=_REMEMBERED)

    def after(self, links: Sequence[MoveCost]) -> tuple[MoveCost, ...]:
        """Return [S − 1] what links take by now, given what has just been measured of each."""
        self._measured.append(np.array([[link.seconds_per_byte, link.fixed_s] for link in links]).reshape(-1, 2))
        typical: Floats = np.median(self._measured, axis=0)
        return tuple(MoveCost(per_byte_s, fixed_s) for per_byte_s, fixed_s in typical.tolist())
