"""Both programs on a disk that is full when the last of a run is written."""

import pytest
from helpers.faults import full_when
from helpers.language_models import PROGRAMS, ended

from vit_examples.harness.run_record import RunRecord


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_summary_that_cannot_be_written_ends_the_run_with_one_line(tmp_path, program):
    folder = tmp_path / "run"
    run = ended(program, folder, "said", "--steps=2", before=lambda: full_when(RunRecord, "close"))
    assert run.returncode == 1, run.stderr
    assert f"error: the run is complete, but {folder}/summary.json: cannot be written: File too large" in run.stderr
    assert '"steps": 2' in run.stderr and "Traceback" not in run.stderr
    assert not list(folder.glob("*summary.json"))
