"""In how many seconds a model takes a further strategy: process groups and modules."""

from __future__ import annotations

from zeroresize.resharding.agreement import meet_over
from zeroresize.strategy.model import SwitchableModel

#: Where the model has made no groups that tell.
SETUP_S = 0.2


def slowest_setup_s(model: SwitchableModel) -> float:
    """Return the seconds of the slowest rank, so that all decide alike; collective."""
    table = meet_over(model.process_group, model.device)(model.setup_s or 0.0, 0.0)
    return max(seconds for seconds, _ in table) or SETUP_S
