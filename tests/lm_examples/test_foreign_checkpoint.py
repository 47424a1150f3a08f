"""Both programs, told to resume from a checkpoint that somebody has changed; and who could."""

import os

import pytest
from helpers.faults import put_into_planner_data, resealed, writable_by_all
from helpers.language_models import PROGRAMS, ended


@pytest.mark.few(1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_code_runs_at_resume_and_the_run_ends_with_one_line(tmp_path, program):
    folder, marker = tmp_path / "run", tmp_path / "marker"
    first = ended(program, folder, "first", "--steps=1", "--set=output.save_every=1")
    assert first.returncode == 0, first.stderr
    (checkpoint,) = (folder / "checkpoints").iterdir()
    put_into_planner_data(checkpoint, marker)
    resealed(checkpoint, ".metadata")
    second = ended(program, folder, "second", "--steps=2", "--resume")
    assert not marker.exists()
    assert second.returncode == 2, second.stderr
    assert f"{checkpoint}: cannot be loaded: " in second.stderr and "it names posix.system" in second.stderr
    assert "Traceback" not in second.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_not_everybody_may_write_to_what_a_run_makes_whatever_the_umask(tmp_path, program):
    folder = tmp_path / "run"
    run = ended(program, folder, "said", "--steps=1", "--set=output.save_every=1", before=lambda: os.umask(0))
    assert run.returncode == 0, run.stderr
    assert (folder / "checkpoints" / "step-00000001" / ".metadata").exists()
    assert writable_by_all(folder) == []
