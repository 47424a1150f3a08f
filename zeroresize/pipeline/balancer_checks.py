"""What must be so of a pipeline and its optimizer, that layers can be balanced."""

from __future__ import annotations

import math

import torch

from zeroresize.optim.independence import why_not_by_parameter
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.policy.pipeline.profile_cadence import ProfileEvery
from zeroresize.resharding.parameter_state import groups_of, require_movable_state
from zeroresize.utils import value_checks


def require_no_ties(pipeline: Pipeline) -> None:
    """Check that no two layers share a parameter.

    Raises:
        ValueError: naming the layers.
    """
    first: dict[int, int] = {}
    for number, layer in enumerate(pipeline.layers):
        for parameter in layer.parameters():
            other = first.setdefault(id(parameter), number)
            if other != number:
                raise ValueError(
                    f"layers {other} and {number} share a parameter, so they cannot be moved one by one: make one "
                    "layer of them and of those between"
                )


def require_stepping_all(pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> list[int | None]:
    """Return the number of each parameter's group in the optimizer, None for those in none.

    Raises:
        ValueError: for an optimizer with which layers cannot move.
    """
    if require_movable_state(optimizer, dict(pipeline.named_parameters())) is None:
        return []
    groups = groups_of(optimizer)
    reason = why_not_by_parameter(optimizer, pipeline.parameters())
    if reason is not None:
        raise ValueError(f"layers cannot move to other stages: {reason}")
    return [groups.get(id(one)) for one in pipeline.parameters()]


def require_cadence(profile_every: ProfileEvery, max_measuring: float) -> None:
    """Check how often layers are to be measured.

    Raises:
        ValueError: naming the option that is not allowed.
    """
    if profile_every != "auto":
        value_checks.at_least("profile_every", profile_every, 1, otherwise='"auto"')
    if max_measuring != math.inf:
        value_checks.number("max_measuring", max_measuring, above=0.0)
