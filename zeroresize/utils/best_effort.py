"""Writing that training does not depend on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class BestEffort:
    """Lets the caller go on where something cannot be written: it is lost, with one warning.

    Args:
        what: what is written, with which the warning begins.
        kind: the class of the errors that are no more than that.

    Attributes:
        has_failed: whether anything was lost.
    """

    def __init__(self, what: str, kind: type[Exception] = OSError) -> None:
        self._what, self._kind = what, kind
        self.has_failed = False

    @contextmanager
    def writing(self, since: str) -> Iterator[None]:
        """Run a block that writes; ``since`` says what is lost first, as in "step 20"."""
        try:
            yield
        except self._kind as error:
            if not self.has_failed:
                logger.warning("%s is incomplete from %s on: %s", self._what, since, error)
            self.has_failed = True
