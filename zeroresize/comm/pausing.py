"""Balancing is paused while a job runs, by a call or a file, on all ranks at once."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from zeroresize.utils.value_checks import is_bool, plain

logger = logging.getLogger(__name__)

#: What balancing may be, the freest first, and what the log says of it.
STATES = {"on": "goes on", "advice": "is paused (advice only)", "off": "is paused"}
VARIABLE = "ZERORESIZE_BALANCING"
#: Seconds from one reading of the file to the next: an update may be each step, and the file on a network.
READ_EVERY_S = 1.0


class Restraint:
    """What this rank wishes balancing to be, and the most restrained wish of any rank, the ``state`` that holds."""

    def __init__(self) -> None:
        self._path, self._of_file, self._word = os.environ.get(VARIABLE), 0, "on"
        self._read_at, self._every_s = 0.0, READ_EVERY_S
        self.of_call, self.state = 0, "on"

    def wish(self) -> float:
        """Return what the other ranks are sent at an update: the number of a state, and a half more from a file."""
        if self._path and time.monotonic() >= self._read_at:
            self._read_at = time.monotonic() + self._every_s
            try:
                with open(self._path, encoding="utf-8", errors="replace") as file:
                    word = (file.read(99).split() or [""])[0].lower()
            except FileNotFoundError:
                word = "on"
            except OSError as error:
                word = str(error)
            if word in STATES:
                self._of_file = list(STATES).index(word)
            elif word != self._word:
                text = "%s=%s begins with none of the words on, advice and off, and what it said before holds: %r"
                logger.warning(text, VARIABLE, self._path, word)
            self._word = word
        return max(self.of_call, self._of_file + 0.5 * (self._of_file > 0))

    def agree(self, wishes: Sequence[float], num_steps: int, *, tells: bool) -> None:
        """Take the wishes of all ranks, after so many steps; the rank that tells logs a change."""
        most, before = max(wishes), self.state
        self.state = list(STATES)[int(most)]
        if tells and self.state != before:
            who = f"the file of {VARIABLE}" if most % 1 else "pause()" if most else "every rank"
            logger.info("balancing %s since step %d, as %s says", STATES[self.state], num_steps, who)


class Pausable:
    """What all balancers have in common: a job that runs can pause them."""

    restraint: Restraint

    def pause(self, advice: bool = False) -> None:
        """Pause balancing on all ranks from the next update on, or the one behind it; one rank's call suffices.

        All ranks are those that decide together: where no units move, replicas do so by themselves, and stages' groups.
        What was lent or pruned is taken back, what has moved stays where it is. So it is, too, while the file that the
        environment variable ``ZERORESIZE_BALANCING`` names begins with the word ``off``, or ``advice``, for any rank.

        Args:
            advice: whether balancing goes on to measure and decide, and tells in the log and its records what it would
                do; what is lent or pruned stays so.

        Raises:
            ValueError: for other values than True and False.
        """
        is_bool("advice", plain(advice))
        self.restraint.of_call = 1 if advice else 2

    def resume(self) -> None:
        """Take back this rank's :meth:`pause`; balancing goes on with what it knows where no rank has it paused."""
        self.restraint.of_call = 0
