"""Numbers for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from zeroresize.best_effort import BestEffort


class EventBoard:
    """Writes scalars where TensorBoard finds them; needs the package ``tensorboard``.

    A thread of that package writes, and nothing after the first number that could not be written: that and all later
    ones are lost, with one warning.

    Args:
        folder: where the events go; one for each process.
        from_step: events of this step and later ones, left by an interrupted run, are hidden; None keeps all.
    """

    def __init__(self, folder: str | Path, *, from_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=from_step)
        # The package may write through TensorFlow, whose errors are its own.
        self._best_effort = BestEffort(f"TensorBoard's {folder}", Exception)

    def add(self, name: str, value: float, step: int) -> None:
        """Show one number."""
        if not self._best_effort.has_failed:
            with self._best_effort.writing(f"step {step}"):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """All is written that can be."""
        with self._best_effort.writing("its last numbers"):
            self._writer.close()
