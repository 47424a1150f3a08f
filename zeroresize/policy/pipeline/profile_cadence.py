"""In which blocks of training the layers are measured; pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ProfileCadence:
    """Every so many blocks, and soon where there is something to look at.

    Attributes:
        every: blocks between two profiles.
        next_due: the block that is measured next, counted from 0.
    """

    every: int
    next_due: int = 0

    def is_due(self, block: int) -> bool:
        """Whether a block is measured."""
        return block >= self.next_due

    def measured(self, block: int) -> None:
        """A block was."""
        self.next_due = block + self.every

    def look_again(self, block: int) -> None:
        """What was decided behind a block must be confirmed: the next one is measured."""
        self.next_due = block + 1

    def moved(self, block: int) -> None:
        """Layers moved behind a block: the next one allocates, so unless all are measured, it is the one behind it."""
        self.next_due = block + (2 if self.every > 1 else 1)
