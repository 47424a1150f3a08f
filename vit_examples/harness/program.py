"""What every training program does around its training: the command line, mistakes, interrupts."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from vit_examples.harness.config_reader import ConfigReader
from vit_examples.harness.interruption import ended_by_interrupt, how_to_go_on
from vit_examples.harness.mistakes import refuse
from vit_examples.harness.run_record import SummaryNotWrittenError

_Config = TypeVar("_Config")
_Run = TypeVar("_Run", bound="Trainable")
_NOT_WRITTEN = 1
_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Trainable(Protocol):
    """A run, of which ``num_done`` steps or epochs are trained."""

    @property
    def num_done(self) -> int: ...


def run_program(
    arguments: Sequence[str] | None,
    reader: ConfigReader[_Config],
    *,
    dry_run: Callable[[_Config, int], Any],
    prepare: Callable[..., _Run],
    train: Callable[[_Run], Any],
    leave: Callable[[_Run], None],
    unit: str,
) -> None:
    """The command line; a mistake of the user's ends it with one line and status 2, Ctrl-C with one line and 130.

    A summary that cannot be written ends it with one line, which says what would be in it, and status 1. Whatever the
    umask, nobody but the owner and the group may write to the files that it makes.

    Args:
        reader: of the program's configuration.
        dry_run: of a configuration for so many ranks.
        prepare: what is to be trained, whether or not it resumes; a ValueError is a mistake of the user's.
        train: trains what is left of a run, which has ``num_done``.
        leave: leaves the process groups.
        unit: of ``num_done``: "steps" or "epochs", a key of ``config.training``.
    """
    os.umask(os.umask(0) | stat.S_IWOTH)  # what a run resumes from is not for everybody to change
    try:
        parsed = reader.argument_parser().parse_args(arguments)
        config = reader.from_arguments(parsed)
        if parsed.dry_run:
            world_size = int(os.environ.get("WORLD_SIZE", reader.default_ranks))
            dry_run(config, world_size if parsed.ranks is None else parsed.ranks)
            return
    except ValueError as error:
        refuse(error)
    with ended_by_interrupt(lambda: how_to_go_on(config, unit)):
        if os.environ.get("RANK") == "0":
            show_messages()
        try:
            run = prepare(config, resume=parsed.resume)
        except ValueError as error:
            refuse(error)
        unwritten: SummaryNotWrittenError | None = None
        try:
            if (done := run.num_done) < getattr(config.training, unit):  # type: ignore[attr-defined]
                train(run)
            elif os.environ.get("RANK") == "0":
                print(f"nothing to do: the checkpoint has {done} {unit}, training.{unit} asks for no more")
        except SummaryNotWrittenError as error:  # on the rank that writes it: the others wait for it to leave
            unwritten = error
        leave(run)
    if unwritten is not None:
        sys.stderr.write(f"error: {unwritten}\n")
        raise SystemExit(_NOT_WRITTEN) from unwritten


def require_torchrun(program: str) -> None:
    """Raise ValueError, saying how to start ``program``, where torchrun's environment is missing."""
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set: training runs on several ranks, start it with "
            f"`torchrun --nproc-per-node 2 -m {program}` (or add --dry-run to check only)"
        )


def join(timeout_s: float) -> ProcessGroup:
    """Join the other ranks that torchrun has started, by gloo; collectives fail after so many seconds."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def show_messages() -> None:
    """What the library has to say: which layers it took, what its calibrations found."""
    library = logging.getLogger("zeroresize")
    library.setLevel(logging.INFO)
    library.propagate = False  # hosts that show everything would show it twice
    if not library.handlers:
        library.addHandler(logging.StreamHandler())
