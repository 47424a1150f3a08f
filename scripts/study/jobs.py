"""A study's runs as jobs of submitit: on SLURM where there is one, and else here, one after the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import submitit

from scripts.study.grid import Cell, Study
from vit_examples.harness.folders import empty
from vit_examples.one_node import started, train_command, train_options
from zeroresize.utils.files import write_whole

#: What a job asks for unless the command line says otherwise.
_DEFAULTS = {"nodes": 1, "timeout_min": 24 * 60}


class Training:
    """Trains a cell, from its newest checkpoint if there is one.

    Called once a node, it starts the ranks of that node, whose output is at the end of ``train.log``. Of a single node
    nothing listens beyond it. Checkpoints are deleted when the cell is finished.

    Raises:
        RuntimeError: if training fails, with what its log says of the reason.
    """

    def __init__(self, study: Study, cell: Cell, num_nodes: int) -> None:
        self.study, self.cell, self.num_nodes = study, cell, num_nodes
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        cell, log, summary = self.cell, self.cell.folder / "train.log", self.cell.folder / "summary.json"
        size_before = log.stat().st_size if log.exists() else 0
        with started(self._command(), log, {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}) as self.process:
            code = self.process.wait()
        if code or not summary.exists():  # ranks that SIGTERM ends have status 0, too
            summary.unlink(missing_ok=True)  # where only the end of a run failed: it is not finished
            lines = log.read_bytes()[size_before:].decode("utf-8", errors="replace").splitlines()
            # Several ranks name the same mistake: once.
            mistakes = dict.fromkeys(line.partition("): ")[2] for line in lines if line.startswith("error (rank"))
            reason = "\n".join(mistakes or lines[-30:])
            raise RuntimeError(f"cell {cell.name!r}, seed {cell.seed} failed with code {code}; from {log}:\n{reason}")
        shutil.rmtree(cell.folder / "checkpoints", ignore_errors=True)

    def _command(self) -> list[str]:
        cell, overrides = self.cell, (*self.cell.overrides, "output.progress=false")
        resumed = ["--resume"] if cell.can_go_on else []
        if self.num_nodes == 1:
            return [*train_command(self.study.config, overrides, cell.ranks), *resumed]
        place = submitit.helpers.TorchDistributedEnvironment()
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.num_nodes}"]
        command += [f"--node-rank={place.rank}", f"--nproc-per-node={cell.ranks // self.num_nodes}"]
        command += [f"--master-addr={place.master_addr}", f"--master-port={place.master_port}"]
        return [*command, *train_options(self.study.config, overrides), *resumed]

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Where SLURM wants the nodes back: the ranks write a checkpoint, from which the job goes on later."""
        if self.process is not None:
            self.process.terminate()
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(Training(self.study, self.cell, self.num_nodes))


class Jobs:
    """Submits trainings.

    Args:
        folder: where submitit keeps its files.
        cluster: of submitit; where it is None, ``slurm`` where ``srun`` is, and else ``debug``, which runs them here.
        parameters: of ``submitit.AutoExecutor.update_parameters``.

    Raises:
        ValueError: if the cluster or a parameter is none of submitit's.
    """

    def __init__(self, folder: Path, cluster: str | None = None, parameters: Mapping[str, Any] | None = None) -> None:
        self._executor = submitit.AutoExecutor(folder, cluster or ("slurm" if shutil.which("srun") else "debug"))
        self._parameters = {**_DEFAULTS, **(parameters or {})}
        try:
            self._executor.update_parameters(**self._parameters)
        except (NameError, AssertionError) as error:
            raise ValueError(f"--job: {error}") from error

    def submit(self, study: Study, cell: Cell) -> submitit.Job[int]:
        """Submit a cell, from its checkpoint or else in an emptied folder.

        Raises:
            ValueError: if another run is at that folder, or the nodes would have different numbers of ranks.
        """
        num_nodes = self._parameters["nodes"] or 0
        if num_nodes < 1 or cell.ranks % num_nodes:
            raise ValueError(f"cell {cell.name!r}: {cell.ranks} ranks do not divide evenly among {num_nodes} nodes")
        if not cell.can_go_on:
            empty(cell.folder)
            write_whole(cell.settings_file, cell.settings)
        of_cell = {"name": study.name, "cpus_per_task": cell.ranks // num_nodes}
        self._executor.update_parameters(**of_cell | self._parameters)
        return self._executor.submit(Training(study, cell, num_nodes))
