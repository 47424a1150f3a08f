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
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from zeroresize.commands import live
from zeroresize.commands.errors import CommandError, require_within
from zeroresize.commands.ranks import Member, StartedRanks
from zeroresize.commands.tables import console, table_of
from zeroresize.utils.extras import need
from zeroresize.utils.progress import LINE_EVERY_S
from zeroresize.utils.texts import duration_text
from zeroresize.utils.usual import middle_of

#: Seconds of a run; in fewer no phase has an update, in more nothing happens any more.
_LEAST_S, _MOST_S = 4.0, 3600.0
#: A rank may be slower by so much; where it is more nothing is left on it.
_MOST_CHI = 100.0
#: Times of even steps differ by no more on an idle machine.
_ALIKE = 1.2
_LOOK_EVERY_S, _NUM_SPARKS = 0.5, 15
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
    phases = [(share, {1: options.chi} if is_slow else {}, is_balanced) for _, share, is_slow, is_balanced in PHASES]
    with StartedRanks(_train, 2, phases, time.time(), options.seconds, str(path)) as ranks:
        _show(ranks, steps, live.Group(path), screen)
    screen.print(steps.table())
    print("\n".join([*steps.disturbances, _NEXT.format(folder=path.parent)]))
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


def _train(member: Member, send: Callable[[Any], None], *arguments: Any) -> None:
    from zeroresize.commands.demo_training import train  # which imports torch, in the ranks alone

    train(member, send, *arguments)


class _Steps:
    """What the ranks have sent: of each update its phase, and the seconds of a step."""

    def __init__(self, chi: float) -> None:
        self._chi = chi
        self.updates: list[tuple[int, float]] = []

    @property
    def phase(self) -> str:
        if not self.updates:
            return "two ranks start"
        number = self.updates[-1][0]
        return f"phase {number + 1} of {len(PHASES)}: {self.text(number)}"

    def text(self, number: int) -> str:
        return PHASES[number][0].format(chi=self._chi)

    def usual_s(self, number: int) -> float:
        """Seconds of a step in the second half of a phase, in which all that moves has moved."""
        of_phase = [step_s for phase, step_s in self.updates if phase == number]
        return middle_of(of_phase[len(of_phase) // 2 :]) if of_phase else math.nan

    @property
    def disturbances(self) -> list[str]:
        """A line where phases that are alike took unlike times."""
        first_s, last_s = sorted((self.usual_s(0), self.usual_s(len(PHASES) - 1)))
        if last_s <= _ALIKE * first_s:
            return []
        return ["Other programs kept this machine busy, as even steps differ: run it again when it is idle."]

    def table(self) -> Any:
        """What a terminal shows of the phases, with a character for a fifteenth of each."""
        even_s, off_s = self.usual_s(0), self.usual_s(1)
        most_s = max((step_s for _, step_s in self.updates), default=math.nan)
        rows = []
        for number, step_s in enumerate(map(self.usual_s, range(len(PHASES)))):
            steps_s = [each_s for phase, each_s in self.updates if phase == number]
            places = [at * len(steps_s) // _NUM_SPARKS for at in range(_NUM_SPARKS if steps_s else 0)]
            drawn = live.blocks([steps_s[place] for place in places], most_s)
            faster = f"{off_s / step_s:.2f} times" if number == 2 else ""
            rows.append((self.text(number), drawn, duration_text(step_s), f"{step_s / even_s:.2f}", faster))
        headings = ("phase", "steps", "a step", "of the even one", "faster than off")
        return table_of(headings, rows, numbers=headings[2:])


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
