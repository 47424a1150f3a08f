"""Which steps a watch listens to: one of so many that it costs a small share of the time; alike on all ranks."""

from __future__ import annotations

import math
from collections import deque

from zeroresize.policy import FEW
from zeroresize.policy.tensor.estimation.times import LEAST_SECONDS
from zeroresize.utils.usual import usual_of

#: Which share of the time may be spent on listening, by a count that sees about two thirds of it.
_SHARE = 0.002
#: Steps are left out only as far as a window lasts for so many seconds.
_LONGEST_S = 60.0
#: What a window has cost decides on the one that begins so many windows later: by then its numbers have come.
_LAG = 4


class Sampling:
    """Decides which steps are listened to, by what that has cost in earlier windows: all of them at first.

    Where the numbers that decide have not come, no step is listened to until they do. So all ranks listen to the same
    steps, and nobody waits.
    """

    def __init__(self, steps_of_window: int) -> None:
        self._steps_of_window = steps_of_window
        self._strides = deque([1] * _LAG)  # of the present window, and of those that follow
        self._costs_s = deque([0.0] * FEW, maxlen=FEW)

    @property
    def stride(self) -> int:
        """One of so many steps is listened to; 0 for none."""
        return self._strides[0] if self._strides else 0

    @property
    def cost_s(self) -> float:
        """What listening to a step usually costs the rank where it costs most."""
        return usual_of(self._costs_s)

    def listens_to(self, step: int) -> bool:
        """Return whether step number ``step``, from 1 on, is listened to.

        The place within each stretch of ``stride`` steps moves on: of ten that are listened to no more than six lie at
        the same place of any period, so what a rank does in each second or tenth step is not taken for usual.
        """
        stride = self.stride
        stretch, place = divmod(step - 1, max(stride, 1))
        return stride > 0 and place == stretch // 2 % stride

    def end_window(self) -> None:
        """Go on with the next window."""
        if self._strides:
            self._strides.popleft()

    def take(self, cost_s: float, step_s: float) -> None:
        """Take what a window has told: the cost of listening to a step, and the seconds of a usual step."""
        self._costs_s.append(cost_s)
        stride = min(self.cost_s / _SHARE, _LONGEST_S / self._steps_of_window) / max(step_s, LEAST_SECONDS)
        self._strides.append(max(math.ceil(stride), 1) if math.isfinite(stride) else 1)
