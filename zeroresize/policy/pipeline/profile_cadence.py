"""In which blocks of training the layers are measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ProfileCadence:
    """Say which blocks are measured: one in so many, and the next one where there is something to look at.

    Attributes:
        every: blocks between two profiles.
        next_due: the block that is measured next, counted from 0.
    """

    every: int
    next_due: int = 0

    def is_due(self, block: int) -> bool:
        """Return whether the layers are measured in this block."""
        return block >= self.next_due

    def measured(self, block: int) -> None:
        """Schedule the next profile ``every`` blocks after this one, which was measured."""
        self.next_due = block + self.every

    def look_again(self, block: int) -> None:
        """Schedule the next profile in the block after this one, as it must confirm what this one's profile wants."""
        self.next_due = block + 1

    def moved(self, block: int) -> None:
        """Schedule the next profile after layers have moved behind this block.

        The block that follows allocates, so unless all blocks are measured it is the one after that.
        """
        self.next_due = block + (2 if self.every > 1 else 1)
