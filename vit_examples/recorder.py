"""What a run writes on rank 0: ``metrics.jsonl``, TensorBoard events and ``summary.json`` in its output folder."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit_examples.code_commit import commit_of_code
from vit_examples.config import RunConfig
from vit_examples.config_file import config_to_dict
from vit_examples.harness.run_folder import writable
from zeroresize.utils.best_effort import BestEffort
from zeroresize.utils.event_board import EventBoard
from zeroresize.utils.json_lines import JsonLines, without_nan

MOST_RANKS_SHOWN = 16
_PACKAGES = ("torch", "colossalai", "transformers", "numpy")


class SummaryNotWrittenError(OSError):
    """What a run has come to could not be written; the message has it."""


class StepClock:
    """Seconds of every iteration, by wall clock. A GPU is synchronised at each :meth:`lap`, whose iterations share the
    time evenly; a CPU needs no synchronisation.

    Args:
        before: seconds of iterations of earlier processes, one sequence each.
        since_lap: those of them that no lap was told of yet.

    Attributes:
        seconds: of this process's iterations.
        is_of_each: whether they are measured one by one.
    """

    def __init__(
        self, device: torch.device, before: Sequence[Sequence[float]] = (), since_lap: Sequence[float] = ()
    ) -> None:
        self._is_gpu = device.type == "cuda"
        self.is_of_each = not self._is_gpu
        self._before, self._carried = before, list(since_lap)
        self.seconds: list[float] = []
        self._pending, self._num_told = 0, 0

    @property
    def by_process(self) -> list[Sequence[float]]:
        """Seconds of all iterations, those of this process last."""
        return [*self._before, self.seconds]

    @property
    def num_since_lap(self) -> int:
        """Iterations since the last lap."""
        return len(self._carried) + len(self.seconds) - self._num_told + self._pending

    def start(self) -> None:
        """The next iteration begins now, for example after an evaluation."""
        self._began, self._pending = time.perf_counter(), 0

    def tick(self) -> None:
        """An iteration is over."""
        self._pending += 1
        if not self._is_gpu:
            self._time_pending()

    def lap(self) -> float:
        """Mean seconds of the iterations since the last lap; NaN for none."""
        since = self.since_lap()
        self._num_told, self._carried = len(self.seconds), []
        return statistics.fmean(since) if since else math.nan

    def since_lap(self) -> list[float]:
        """Seconds of the iterations since the last lap; a GPU is synchronised."""
        if self._pending:  # on a GPU
            torch.cuda.synchronize()
            self._time_pending()
        return self._carried + self.seconds[self._num_told :]

    def _time_pending(self) -> None:
        now = time.perf_counter()
        self.seconds += [(now - self._began) / self._pending] * self._pending
        self._began, self._pending = now, 0


class Recorder:
    """Writes a run's numbers; one line of JSON for each logged step (``kind`` step) and each epoch (``kind`` epoch).

    What cannot be written while training runs is lost, with one warning a file. The ``summary.json`` of an earlier
    process is deleted, unless nothing is left to train.

    The ``balance/`` numbers of a step are rank 0's own, so that logging costs no exchange; ``balance-rank<r>.jsonl``
    has every rank's. An epoch has what every rank is relieved of, and the seconds of each of its steps where they are
    known.

    Args:
        from_epoch: lines of this epoch and later ones, left by an interrupted run, are dropped; 0 starts anew.
        from_step: the optimizer step that goes with it.
        total_steps: of the whole run; goes into ``config.json`` for those who watch.
        commits: of the code that trained before ``from_epoch``.

    Attributes:
        commits: with that of the code that trains now.

    Raises:
        ValueError: naming the file, if it cannot be made, or what is there is damaged.
    """

    def __init__(
        self, config: RunConfig, *, from_epoch: int, from_step: int, total_steps: int, commits: Sequence[str] = ()
    ) -> None:
        self._config = config
        self._folder = Path(config.output.folder)
        self._summary = self._folder / "summary.json"
        self._from_step = from_step
        self.commits = list(dict.fromkeys([*commits, commit_of_code()]))  # now: by the end the files may be others
        described = {**config_to_dict(config), "total_steps": total_steps}
        metrics = self._folder / "metrics.jsonl"
        self._metrics = BestEffort(str(metrics))
        with writable(self._folder):
            self._lines = JsonLines(metrics, ("epoch", from_epoch - 1))
            self._board = EventBoard(self._folder / "tensorboard", from_step=from_step)
            if from_epoch < config.training.epochs:
                self._summary.unlink(missing_ok=True)
            (self._folder / "config.json").write_text(json.dumps(described, indent=1), encoding="utf-8")

    def step(self, *, epoch: int, step: int, loss: Tensor, lr: float, step_s: float, balance: dict[str, float]) -> None:
        """One logged step; ``step_s`` is the mean of the steps since the last logged one, in seconds."""
        numbers = {"loss": loss.item(), "lr": lr, "step_s": step_s, **balance}
        with self._metrics.writing(f"step {step}"):
            self._lines.write({"kind": "step", "epoch": epoch, "step": step, **numbers})
        self._show(numbers, "train/", step)

    def epoch(
        self,
        *,
        epoch: int,
        step: int,
        numbers: dict[str, float],
        ratios: list[list[float]],
        seconds: Sequence[float] = (),
    ) -> None:
        """One epoch; ``ratios`` holds for every logged step which share of what its host gave it each rank does not
        compute (negative where it owns more), ``seconds`` is of each step, if known.

        The means of ``ratios`` are added as ``ratio_rank<r>`` (on TensorBoard ``epoch/ratio_rank<r>``), of 16 ranks at
        most. ``from_step`` is the first step of this process.
        """
        by_rank = list(zip(*ratios, strict=True))[:MOST_RANKS_SHOWN]
        numbers = numbers | {f"ratio_rank{rank}": statistics.mean(own) for rank, own in enumerate(by_rank)}
        line = {"kind": "epoch", "epoch": epoch, "step": step, "from_step": self._from_step, **numbers}
        times = {"seconds": [round(one, 6) for one in seconds]} if seconds else {}
        with self._metrics.writing(f"step {step}"):
            self._lines.write({**line, "ratios": ratios, **times})
        self._show(numbers, "epoch/", step)

    def close(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``, whole or not at all, with commits, versions and configuration added.

        Raises:
            SummaryNotWrittenError: if it cannot be written.
        """
        self._board.close()
        with self._metrics.writing("its end"):
            self._lines.close()
        commit = " ".join(self.commits)
        summary = {**summary, "commit": commit, "versions": _versions(), "config": config_to_dict(self._config)}
        write_summary(self._summary, summary)

    def _show(self, numbers: dict[str, float], prefix: str, step: int) -> None:
        for name, value in numbers.items():
            if not math.isnan(value):
                self._board.add(name if "/" in name else prefix + name, value, step)


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write what a run has come to, whole or not at all.

    Raises:
        SummaryNotWrittenError: if it cannot be written; other than telemetry it is what the run was for.
    """
    unfinished = path.with_name(f"unfinished-{path.name}")
    try:
        unfinished.write_text(json.dumps(without_nan(summary), indent=1), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        plain = {key: value for key, value in without_nan(summary).items() if not isinstance(value, dict)}
        raise SummaryNotWrittenError(
            f"the run is complete, but {path}: cannot be written: {error.strerror}; it would say {json.dumps(plain)}"
        ) from error


def num_settling(seconds: Sequence[float], settle_steps: int) -> int:
    """How many first iterations of a process are not timed: ``settle_steps``, but at most half of them."""
    return min(settle_steps, len(seconds) // 2)


def timing(
    by_process: Sequence[Sequence[float]], *, settle_steps: int, batch_size: int, steps_per_epoch: int
) -> dict[str, float]:
    """What the seconds of a run's iterations say of its speed; NaN where there are none.

    ``step_ms`` is their median, an undisturbed step, and ``mean_step_ms`` their mean, which also holds the steps before
    a plan follows a straggler. ``images_per_s`` and ``epoch_s``, the seconds of training of an epoch without evaluation
    and checkpoints, come from the mean.

    Args:
        by_process: one sequence for each process that trained a part of the run.
        settle_steps: so many first iterations of each, at most half, are left out.
    """
    settled = [one for seconds in by_process for one in seconds[num_settling(seconds, settle_steps) :]] or [math.nan]
    mean_s = statistics.fmean(settled)
    return {
        "step_ms": 1e3 * statistics.median(settled),
        "mean_step_ms": 1e3 * mean_s,
        "images_per_s": batch_size / mean_s,
        "epoch_s": mean_s * steps_per_epoch,
    }


def _versions() -> dict[str, str]:
    from zeroresize import __version__

    versions = {"python": platform.python_version(), "zeroresize": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
