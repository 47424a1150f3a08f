"""What runs in the processes that plan iterations: they import no torch, unless what they call does.

:class:`IterationPlanner` is what they call; what comes of it they leave in a file.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from zeroresize.policy.microbatches.costs import CostTable, StageCosts
from zeroresize.policy.microbatches.plan import Indices, PlanningOptions
from zeroresize.policy.microbatches.planning import plan_iteration
from zeroresize.utils.checked import checked
from zeroresize.utils.hashing import digest

#: ``plan(iteration)`` returns the text of an iteration's plan, the same in whatever process it is called.
Plan = Callable[[int], str]

PLAN, FAILURE = b"P", b"F"
#: Bytes that a value may have: TCPStore closes the connection of who sends 8 MiB.
MOST_BYTES = 8 * 2**20 - 1024
#: For planners: one thread each, and no GPU.
_LIMITS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"),
    "CUDA_VISIBLE_DEVICES": "",
}
#: Seconds between two looks at the parent.
_LOOK_S = 0.5


class PlanningError(RuntimeError):
    """Tells that there is no plan of an iteration, and why."""


def plan_value(text: str) -> bytes:
    """Return what the store keeps of a plan; zlib's fastest level makes it a few times smaller in a millisecond."""
    return PLAN + zlib.compress(text.encode(), 1)


def failure_value(kind: str, text: str) -> bytes:
    """Return what the store keeps in place of a plan: the name of an error's class, and what it said."""
    return FAILURE + json.dumps({"kind": kind, "text": text}).encode()


@checked()
@dataclass(frozen=True)
class IterationPlanner:
    """Plans iterations: what planner processes call, to which it goes pickled.

    Attributes:
        lengths_of: returns [N, A] tokens of the samples of an iteration, in their order; a function of a module, or an
            object that can be pickled.
        table: costs of the model's layers.
        boundaries: [S + 1] of the pipeline's stages.
        options: of planning.
    """

    lengths_of: Callable[[int], Indices]
    table: CostTable
    boundaries: tuple[int, ...]
    options: PlanningOptions

    def __post_init__(self) -> None:
        self.costs, self.fingerprint  # noqa: B018 - processes are given both

    @cached_property
    def costs(self) -> dict[str, StageCosts]:
        """What the stages take, by what is computed again."""
        return self.table.costs(self.boundaries)

    @cached_property
    def fingerprint(self) -> str:
        """What plans of this planner carry: costs, stages and options."""
        return digest(self.table.fingerprint, repr((self.boundaries, self.options))).hex()

    def __call__(self, iteration: int) -> str:
        """Return the plan of an iteration as text."""
        lengths = self.lengths_of(iteration)
        return plan_iteration(iteration, lengths, self.costs, self.options, model=self.fingerprint).to_json()


def begin_process(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the training process ends this one
    os.environ.update(_LIMITS)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()


def _end_with_parent(folder: Path) -> None:
    parent, training = os.getppid(), multiprocessing.parent_process()
    while os.getppid() == parent and (training is None or training.is_alive()):
        time.sleep(_LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def plan_in_process(path: Path, iteration: int) -> float:
    """Plan an iteration, leave what comes of it in a file, and return the seconds.

    What goes through the pool's pipes is so short that no process is killed in the midst of writing it: the pool would
    wait for the rest.
    """
    random.seed(iteration)  # what is drawn in planning is the same whichever process does it
    np.random.seed(iteration % 2**32)
    began = time.perf_counter()
    try:
        function = _loaded(path)
        begun_path(path, iteration).touch()
        text = function(iteration)
        if not isinstance(text, str):
            raise TypeError(f"the function that plans has returned {type(text).__name__}: text is needed")
        value = plan_value(text)
        if len(value) > MOST_BYTES:
            raise PlanningError(f"its plan has {len(value)} bytes, and a store takes {MOST_BYTES} at most")
    except (ValueError, PlanningError) as error:
        value = failure_value(type(error).__name__, str(error))
    except BaseException as error:  # also of a program that wants to exit
        value = failure_value(type(error).__name__, f"{error!r}\n{traceback.format_exc()}")
    path_of(path, iteration).write_bytes(value)
    return time.perf_counter() - began


@functools.lru_cache(maxsize=1)
def _loaded(path: Path) -> Plan:
    try:
        plan: Plan = pickle.loads(path.read_bytes())
    except Exception as error:
        raise PlanningError(
            f"processes cannot load the function that plans ({type(error).__name__}: {error}): it has to be one of a "
            "module, or an object of a class of a module, and not of the program that is run"
        ) from error
    return plan


def path_of(path: Path, iteration: int) -> Path:
    """The file in which what came of an iteration is left, beside that of the function."""
    return path.with_suffix(f".{iteration}")


def begun_path(path: Path, iteration: int) -> Path:
    """The file that is there once the process has imported all that it plans an iteration with."""
    return path.with_suffix(f".{iteration}.begun")
