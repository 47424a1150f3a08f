"""Train a small model on two ranks of this machine, one of them slow for a while: without balancing, and with it.

The blocks of a transformer are split by torch's parallelize_module over two processes of a thread each, which reach
each other over loopback alone; data are random. Rank 1's products take CHI times as long in the middle of the run. What
the balancer tells is written to FOLDER/status.jsonl, for `zeroresize live`. Ctrl-C ends all.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from zeroresize.commands import live
from zeroresize.commands.errors import CommandError, require_within
from zeroresize.commands.ranks import StartedRanks
from zeroresize.commands.tables import console, table_of
from zeroresize.utils.extras import need
from zeroresize.utils.progress import LINE_EVERY_S
from zeroresize.utils.texts import duration_text

#: Seconds of a run; in fewer no phase has an update, in more nothing happens any more.
_LEAST_S, _MOST_S = 4.0, 3600.0
#: A rank may be slower by so much; where it is more nothing is left on it.
_MOST_CHI = 100.0
#: Times of even steps differ by no more on an idle machine.
_ALIKE = 1.2
_LOOK_EVERY_S = 0.5
_NEXT = """
Next:
  zeroresize report {folder}    # one page of it: who was slow, what was decided, and did it pay
In a program whose model is split over ranks, by these layers or by those of a host:
  import zeroresize as zr
  balancer = zr.Balancer(model, optimizer, on_status=zr.JsonLinesTelemetry("status.jsonl"))
  balancer.step()    # after each optimizer.step()"""


#: Parts of the run: what happens, the share of its seconds, whether rank 1 is slow, and whether balancing is on.
PHASES = (
    ("both ranks equally fast", 0.15, False, True),
    ("χ = {chi:g} on rank 1, balancing off", 0.25, True, False),
    ("χ = {chi:g} on rank 1, mode exact", 0.4, True, True),
    ("both equally fast again", 0.2, False, True),
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="of the whole run, at least a third of them for training (default 60)",
    )
    parser.add_argument("--chi", type=float, default=4.0, help="how many times slower rank 1 is made (default 4)")
    parser.add_argument("--folder", type=Path, help="where the status is written (default: a new temporary one)")


def run(options: argparse.Namespace) -> int:
    require_within("--seconds", options.seconds, _LEAST_S, _MOST_S)
    require_within("--chi", options.chi, 1.0, _MOST_CHI)
    screen, path, steps = console(), _new_file(options.folder), _Steps(options.chi)
    from zeroresize.commands.demo_training import train  # and so torch, once all else is right

    phases = [(share, {1: options.chi} if is_slow else {}, is_balanced) for _, share, is_slow, is_balanced in PHASES]
    with StartedRanks(train, 2, phases, time.time(), options.seconds, str(path)) as ranks:
        _show(ranks, steps, live.Group(path), screen)
    screen.print(steps.table())
    first_s, last_s = sorted((steps.usual_s(0), steps.usual_s(len(PHASES) - 1)))
    if last_s > _ALIKE * first_s:
        print("Other programs kept this machine busy, as even steps differ: run it again when it is idle.")
    print(_NEXT.format(folder=path.parent))
    return 0


def _new_file(folder: Path | None) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="zeroresize_demo_")) if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "status.jsonl"
        path.touch(exist_ok=False)
    except OSError as error:
        raise CommandError(f"--folder {folder}: a status.jsonl cannot be made there: {error.strerror}") from error
    return path


class _Steps:
    """What the ranks have sent: of each update its phase, and the seconds of a step."""

    def __init__(self, chi: float) -> None:
        self._texts = [text.format(chi=chi) for text, *_ in PHASES]
        self.updates: list[tuple[int, float]] = []

    @property
    def phase(self) -> str:
        if not self.updates:
            return "two ranks start"
        number = self.updates[-1][0]
        return f"phase {number + 1} of {len(PHASES)}: {self._texts[number]}"

    def usual_s(self, number: int) -> float:
        """Seconds of a step in the second half of a phase, in which all that moves has moved."""
        of_phase = [step_s for phase, step_s in self.updates if phase == number]
        return median(of_phase[len(of_phase) // 2 :]) if of_phase else math.nan

    def table(self) -> Any:
        """What a terminal shows of the phases."""
        steps_s = [self.usual_s(number) for number in range(len(PHASES))]
        rows = [
            (text, duration_text(s), f"{s / steps_s[0]:.2f}", "") for text, s in zip(self._texts, steps_s, strict=True)
        ]
        rows[2] = (*rows[2][:3], f"{steps_s[1] / steps_s[2]:.2f} times")
        headings = ("phase", "a step", "of the even one", "faster than off")
        return table_of(headings, rows, numbers=headings[1:])


def _show(ranks: StartedRanks, steps: _Steps, group: live.Group, screen: Any) -> None:
    group_of, text_of = need("rich.console", "cli").Group, need("rich.text", "cli").Text
    view = need("rich.live", "cli").Live(console=screen, auto_refresh=False, transient=True)
    said, told_at = "", 0.0
    with view if screen.is_terminal else nullcontext():
        while not ranks.have_ended:
            if screen.is_terminal:
                group.look()
                phase = text_of(steps.phase, style="bold")
                view.update(group_of(phase, live.shown([group], screen.width)), refresh=True)
            elif steps.phase != said or time.monotonic() - told_at > LINE_EVERY_S:
                said, told_at = steps.phase, time.monotonic()
                print(said, flush=True)
            steps.updates += ranks.received(_LOOK_EVERY_S)
