"""Training with strategies while ranks are slow, in virtual time: what deciding about stragglers brings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zeroresize.policy.strategy.stragglers.candidates import StrategyCosts
from zeroresize.policy.strategy.stragglers.decision import StragglerDecision


@dataclass(frozen=True)
class StragglerRun:
    """Hold what a training took.

    Attributes:
        steps_s: of each step.
        switches: (steps that were over, what was done, seconds), in order.
    """

    steps_s: tuple[float, ...]
    switches: tuple[tuple[int, str, float], ...]

    @property
    def seconds(self) -> float:
        """Return the seconds of all steps and switches."""
        return math.fsum(self.steps_s) + math.fsum(own_s for *_, own_s in self.switches)


def simulate_stragglers(
    decision: StragglerDecision, costs: StrategyCosts, speeds_of_steps: Iterable[Sequence[float]], *, delay: int = 0
) -> StragglerRun:
    """Train as long as there are speeds, and carry out what is decided.

    Args:
        decision: is told the speeds after each step, as if they had been measured without noise.
        speeds_of_steps: of all ranks in each step.
        delay: steps after which it is known how fast the ranks were in one.
    """
    steps_s, switches, known_speeds = list[float](), list[tuple[int, str, float]](), list[Sequence[float]]()
    for number, speeds in enumerate(speeds_of_steps, 1):
        steps_s.append(costs.step_s(decision.in_force, speeds))
        known_speeds.append(speeds)
        if number <= delay:
            continue
        proposal = decision.update(known_speeds[-1 - delay])
        if proposal is not None:
            decision.made(proposal, known_speeds[-1 - delay])
            switches.append((number, proposal.candidate.key, proposal.switch_s))
    return StragglerRun(tuple(steps_s), tuple(switches))
