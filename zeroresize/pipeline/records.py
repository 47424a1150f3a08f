"""What a pipeline's balancer has measured, as telemetry gets it: plain numbers, the same on every rank.

``L`` layers, ``S`` stages. In a file, ``JsonLinesTelemetry("pipeline.jsonl")``, each has the ``kind`` "profile", and a
:class:`~zeroresize.telemetry.ChangeRecord` has "layers".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zeroresize.policy.pipeline.profiles import LayerProfile, PipelineProfile
from zeroresize.runtime.schedules import Schedule
from zeroresize.runtime.simulated_steps import simulated_step
from zeroresize.utils.codec import decoded
from zeroresize.utils.files import without_nan


@dataclass(frozen=True)
class ProfileRecord:
    """Records one profiled block of ``PipelineBalancer.step``. Seconds are of all its micro-batches.

    Attributes:
        step: how many blocks were over when all ranks knew of it, one or two behind the profiled one.
        boundaries: [S + 1] in force in it.
        layers: [L] seconds and bytes of each layer.
        stage_s: [S] seconds that each stage computed, the last one with the loss.
        step_s: wall time of the block, of the slowest stage.
        imbalance: (L_max − L_min) / mean L of ``stage_s``.
        bubble_ratios: [S] the share of ``step_s`` in which each stage computed nothing.
        bubble_ratio: their mean.
        simulated_step_s, simulated_bubble_ratio: by the schedule, from the layers' seconds, without messages.
        profile_every: blocks from this profile to the next regular one; None where no balancer has set it.
        profile_cost: how many steps a profile takes; NaN while it is not known.
    """

    step: int
    boundaries: tuple[int, ...]
    layers: tuple[LayerProfile, ...]
    stage_s: tuple[float, ...]
    step_s: float
    imbalance: float
    bubble_ratios: tuple[float, ...]
    bubble_ratio: float
    simulated_step_s: float
    simulated_bubble_ratio: float
    profile_every: int | None = None
    profile_cost: float = math.nan

    @classmethod
    def of(
        cls,
        step: int,
        profile: PipelineProfile,
        schedule: Schedule,
        num_microbatches: int,
        profile_every: int | None = None,
        profile_cost: float = math.nan,
    ) -> ProfileRecord:
        """Return the record of a profile that all ranks know when ``step`` blocks are over."""
        forward_s, backward_s = (
            [
                math.fsum(getattr(one, name) for one in profile.layers[begin:end]) / num_microbatches
                for begin, end in itertools.pairwise(profile.boundaries)
            ]
            for name in ("forward_s", "backward_s")
        )
        simulated = simulated_step(forward_s, backward_s, num_microbatches, schedule=schedule)
        return cls(
            step,
            profile.boundaries,
            profile.layers,
            profile.computed_s,
            max(profile.stage_s),
            profile.imbalance,
            profile.bubble_ratios,
            profile.bubble_ratio,
            simulated.step_s,
            simulated.bubble_ratio,
            profile_every,
            profile_cost,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProfileRecord:
        """Return the record of which :meth:`to_dict` has made these values, such as a line of a file.

        Raises:
            ValueError: naming what is missing, or no number or list of numbers.
        """
        if values.get("kind") != "profile":
            raise ValueError(f"this is no profile: kind={values.get('kind')!r}")
        cost = values.get("profile_cost")
        return decoded(cls, {**values, "profile_cost": math.nan if cost is None else cost}, "profile")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, None for NaN."""
        return without_nan({"kind": "profile", **asdict(self)})

    def scalars(self) -> dict[str, float]:
        """Return numbers by name: under ``pipeline/``, those of stages under ``pipeline_stages/``."""
        names = ("step_s", "imbalance", "bubble_ratio", "simulated_step_s", "simulated_bubble_ratio")
        numbers = {f"pipeline/{name}": getattr(self, name) for name in names}
        if self.profile_every is not None:
            numbers |= {"pipeline/profile_every": float(self.profile_every), "pipeline/profile_cost": self.profile_cost}
        for stage, (begin, end) in enumerate(itertools.pairwise(self.boundaries)):
            of_stage = {
                "layers": float(end - begin),
                "seconds": self.stage_s[stage],
                "bytes": float(sum(one.bytes_at_rest + one.activation_bytes for one in self.layers[begin:end])),
                "bubble_ratio": self.bubble_ratios[stage],
            }
            numbers |= {f"pipeline_stages/{stage}_{name}": value for name, value in of_stage.items()}
        return numbers
