"""What saves less than a share of a step is noise: the same rule for units, layers and strategies.

They differ in the share only. Of layers and strategies it is an option, :data:`MIN_SAVING`. Of units it is what the
filter of a rank's times says that noise is, beside what a change takes
(:class:`~zeroresize.policy.tensor.controller.Controller`).
"""

from __future__ import annotations

#: Share of a step that a change must save at least, where nothing measures how large noise is.
MIN_SAVING = 0.02


def is_saving(saving_s: float, step_s: float, least: float) -> bool:
    """Whether a change saves more than noise.

    Args:
        saving_s: seconds by which steps become shorter.
        step_s: seconds of a step as it is.
        least: share of a step that is noise.
    """
    return saving_s > least * step_s


def beyond_noise(saving_s: float, step_s: float, least: float) -> float:
    """Return the saving, negative for a loss, or 0 where :func:`is_saving` takes it for noise."""
    return saving_s if is_saving(abs(saving_s), step_s, least) else 0.0
