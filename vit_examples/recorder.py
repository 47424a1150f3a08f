"""What a run writes and shows on rank 0: lines of steps and epochs, TensorBoard, and of which commit the code is."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from vit_examples.config import RunConfig
from vit_examples.config_file import READER
from vit_examples.harness.run_record import RunRecord
from vit_examples.launch import ROOT

MOST_RANKS_SHOWN = 16
#: Training runs nothing else of the repository.
_CODE = ("vit_examples", "zeroresize")


class Recorder(RunRecord):
    """Writes one line of JSON for each logged step (``kind`` step) and each epoch (``kind`` epoch), and shows epochs.

    The ``balance/`` numbers of a step are rank 0's own, so that logging costs no exchange; ``balance-rank<r>.jsonl``
    has every rank's. An epoch has what every rank is relieved of, and the seconds of each of its steps where they are
    known.

    Args:
        from_epoch: lines of this epoch and later ones, left by an interrupted run, are dropped; 0 starts anew.
        from_step: the optimizer step that goes with it.
        total_steps: of the whole run.
        commits: of the code that trained before ``from_epoch``.

    Attributes:
        commits: with that of the code that trains now.

    Raises:
        ValueError: naming the file, if it cannot be made, or what is there is damaged.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        num_ranks: int,
        from_epoch: int,
        from_step: int,
        total_steps: int,
        commits: Sequence[str] = (),
        console: Console | None = None,
    ) -> None:
        self._from_step = from_step
        self.commits = list(dict.fromkeys([*commits, commit_of_code()]))  # now: by the end the files may be others
        super().__init__(
            READER.to_dict(config),
            f"{config.host}, {num_ranks} ranks, balance {config.balance.mode}",
            folder=Path(config.output.folder),
            files={"metrics": ("epoch", from_epoch - 1)},
            num_steps=total_steps,
            num_done=from_step,
            first_event=from_step,
            headings=("epoch", "loss", "ms/step", "test accuracy", "work", "slow ranks"),
            is_shown=config.output.progress,
            console=console,
        )

    def metrics(
        self, *, epoch: int, step: int, loss: Tensor, lr: float, step_s: float, balance: dict[str, float]
    ) -> None:
        """Write one logged step; ``step_s`` is the mean of the steps since the last logged one, in seconds."""
        numbers = {"loss": loss.item(), "lr": lr, "step_s": step_s, **balance}
        self.write("metrics", {"kind": "step", "epoch": epoch, "step": step, **numbers})
        self.plot(numbers, "train/", step)

    def epoch(
        self,
        *,
        epoch: int,
        step: int,
        numbers: dict[str, float],
        ratios: list[list[float]],
        seconds: Sequence[float] = (),
    ) -> None:
        """Write one epoch; ``ratios`` holds for every logged step which share of what its host gave it each rank does
        not compute (negative where it owns more), ``seconds`` is of each step, if known.

        The means of ``ratios`` are added as ``ratio_rank<r>`` (on TensorBoard ``epoch/ratio_rank<r>``), of 16 ranks at
        most. ``from_step`` is the first step of this process.
        """
        by_rank = list(zip(*ratios, strict=True))[:MOST_RANKS_SHOWN]
        numbers = numbers | {f"ratio_rank{rank}": statistics.mean(own) for rank, own in enumerate(by_rank)}
        line = {"kind": "epoch", "epoch": epoch, "step": step, "from_step": self._from_step, **numbers}
        times = {"seconds": [round(one, 6) for one in seconds]} if seconds else {}
        self.write("metrics", {**line, "ratios": ratios, **times})
        self.plot(numbers, "epoch/", step)

    def show_epoch(
        self, epoch: int, loss: float, step_ms: float, accuracy: float, ratios: list[float], slow: list[int]
    ) -> None:
        """Show one row, or a line of at most 80 columns; epochs are counted from 1 here, ranks from 0.

        Args:
            ratios: which share of what its host gave it each rank does not compute; negative for one that owns more.
                Shown is what is left: its work.
        """
        work = _short([1.0 - ratio for ratio in ratios])
        cells = (str(epoch), f"{loss:.3f}", f"{step_ms:.0f}", f"{accuracy:.1%}", work, _names(slow))
        self.row(cells, "epoch {}: loss {}, {} ms/step, acc. {}, work {}, slow {}".format(*cells))

    def close(self, summary: Mapping[str, Any], table: Table | None = None) -> None:
        super().close({**summary, "commit": " ".join(self.commits)}, table)


def commit_of_code() -> str:
    """Return the short hash of the commit that the code is of, with ``-dirty`` where the code differs from it.

    Empty where the code is no git checkout, or git is missing.
    """
    try:
        _git("ls-files", "--error-unmatch", *_CODE)  # it may lie, untracked, within a repository of something else
        changes = _git("status", "--porcelain", "--", *_CODE)
        return _git("rev-parse", "--short", "HEAD") + ("-dirty" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _short(work: list[float]) -> str:
    """Of two ranks each one's, of more that of the only one that has another than 1, or the range."""
    others = [rank for rank, share in enumerate(work) if share != 1.0]
    if len(work) <= 2:
        return " ".join(f"{share:.2f}" for share in work) or "–"
    if len(others) > 1:
        return f"{min(work):.2f}–{max(work):.2f}"
    return f"{work[others[0]]:.2f} on {others[0]}" if others else "1.00"


def _names(ranks: list[int]) -> str:
    return f"{len(ranks)} ranks" if len(ranks) > 3 else " ".join(map(str, ranks)) or "–"
