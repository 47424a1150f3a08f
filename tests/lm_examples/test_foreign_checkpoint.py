"""Both programs, told to resume from a checkpoint that somebody has changed."""

from pathlib import Path

import pytest
from foreign_code import put_into_planner_data, resealed
from forked_training import forked_training

from lm_examples import train, train_strategies

SOURCES = Path(__file__).resolve().parents[2] / "lm_examples" / "cases"
PROGRAMS = {
    "pipeline": (train.main, ["model={num_blocks: 2, hidden_size: 8, num_heads: 2, context: 8}"]),
    "strategies": (
        train_strategies.main,
        [
            "model={num_blocks: 2, hidden_size: 8, num_heads: 2, mlp_size: 8}",
            "strategies={static: [1, 2, 1]}",
            "data.max_length=24",
            "training.tokens=48",
            "training.max_tokens=24",
        ],
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_code_runs_at_resume_and_the_run_ends_with_one_line(tmp_path, program):
    main, settings = PROGRAMS[program]
    folder, marker = tmp_path / "run", tmp_path / "marker"
    arguments = [f"--output={folder}", f"--data={SOURCES}", *(f"--set={one}" for one in settings)]
    if program == "strategies":
        arguments.append("--config=switching_two_ranks")
    saving = [*arguments, "--steps=1", "--set=output.save_every=1"]
    ended = forked_training(saving, tmp_path / "first", main=main)
    assert ended.returncode == 0, ended.stderr
    (checkpoint,) = (folder / "checkpoints").iterdir()
    put_into_planner_data(checkpoint, marker)
    resealed(checkpoint, ".metadata")
    ended = forked_training([*arguments, "--steps=2", "--resume"], tmp_path / "second", main=main)
    assert not marker.exists()
    assert ended.returncode == 2, ended.stderr
    assert f"{checkpoint}: cannot be loaded: " in ended.stderr and "it names posix.system" in ended.stderr
    assert "Traceback" not in ended.stderr
