"""What the example programs share: ranks that agree, a folder of one run's own, checkpoints, records, interrupts."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

import torch
from helpers.faults import files_of_at_most
from helpers.runs import ONE_NODE, TORCHRUN, interrupted, launched, long_run, write_parquet

import zeroresize as zr
from vit_examples.config import load_config
from vit_examples.harness.checkpoints import (
    complete,
    load_checkpoint,
    newest,
    read_state,
    save_checkpoint,
)
from vit_examples.harness.folders import claimed, empty
from vit_examples.harness.program import agreed
from vit_examples.harness.run_folder import RunRecord, how_to_go_on
from zeroresize.utils import progress
from zeroresize.utils.files import read_json_lines


def config_of(folder: Path, *changes: str) -> Any:
    return load_config("demo", [f"output.folder={folder}", "output.progress=true", *changes])


def test_ranks_agree_on_what_has_failed_anywhere(run_ranks) -> None:
    def check(rank: int, group: Any) -> list[str]:
        def fail(text: str) -> None:
            raise ValueError(text)

        said = [str(agreed(lambda: rank, group)), str(agreed(lambda: rank + 5, group, first_only=True))]
        for call in (lambda: fail("wrong"), lambda: fail(f"wrong {rank}"), lambda: rank or fail("first")):
            with pytest.raises(ValueError) as error:
                agreed(call, group)
            said.append(str(error.value))
        return said

    same = ["wrong", "rank 0: wrong 0\nrank 1: wrong 1", "first"]
    assert run_ranks(check, 2) == [["0", "5", *same], ["1", "None", *same]]


LOCKING = """
import sys, time
from pathlib import Path
from vit_examples.harness.folders import claimed
with claimed(Path(sys.argv[1])):
    print("has it", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_one_processes_until_that_ends_however(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", LOCKING, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None and process.stdout.readline() == b"has it\n"
    (tmp_path / "metrics.jsonl").touch()
    for use in (lambda: claimed(tmp_path).__enter__(), lambda: empty(tmp_path)):
        with pytest.raises(ValueError, match="another run is writing there"):
            use()
    process.send_signal(signal.SIGKILL)
    process.wait()
    empty(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written to"), claimed(tmp_path / "file"):
        pass


def test_a_checkpoint_goes_on_and_old_ones_go(run_ranks, tmp_path: Path) -> None:
    config = config_of(tmp_path, "output.keep=2")
    state = {"layout": {"size": 4}, "epochs": 1}

    def check(rank: int, group: Any) -> tuple[float, float, list[str]]:
        def made(seed: int) -> tuple[Any, Any]:
            torch.manual_seed(seed)
            model = torch.nn.Sequential(zr.ColumnParallelLinear(4, 8, process_group=group))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            return model, optimizer

        saved, loaded = made(0), made(1)
        (tmp_path / "checkpoints" / "epoch-00000000.tmp").mkdir(parents=True, exist_ok=True)  # as a kill leaves it
        for number in (1, 2, 3):
            assert save_checkpoint(config, {"epoch": number}, state, saved, process_group=group)
        load_checkpoint(tmp_path / "checkpoints" / "epoch-00000003", loaded, process_group=group)
        differ = (saved[0][0].weight - loaded[0][0].weight).abs().max().item()
        names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        return differ, loaded[1].param_groups[0]["lr"], names

    for differ, lr, names in run_ranks(check, 2):
        assert (differ, lr) == (0.0, 0.2)  # the optimizer's settings stay its own
        assert names == ["epoch-00000002", "epoch-00000003"]
    checkpoint = newest(tmp_path / "checkpoints")
    assert checkpoint is not None and complete(tmp_path / "checkpoints")[-1] == checkpoint
    assert read_state(checkpoint, {"size": 4}) == state
    assert "goes on after epoch 3" in how_to_go_on(config)
    with pytest.raises(ValueError, match="of another layout, nothing was loaded"):
        read_state(checkpoint, {"size": 5})
    (checkpoint / "state.json").write_text("[")
    with pytest.raises(ValueError, match=r"state\.json: cannot be read"):
        read_state(checkpoint, {"size": 4})
    assert "begins anew" in how_to_go_on(config_of(tmp_path / "other"))


def test_on_a_full_disk_there_is_a_warning_and_no_half_checkpoint(run_ranks, tmp_path: Path) -> None:
    config = config_of(tmp_path)

    def check(rank: int, group: Any) -> bool:
        model = torch.nn.Linear(100, 100)
        tensors = model, torch.optim.AdamW(model.parameters())
        with files_of_at_most(1000):
            return save_checkpoint(config, {"epoch": 1}, {"layout": {}}, tensors, process_group=group)

    assert run_ranks(check, 2) == [False, False]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def record_of(config: Any, **options: Any) -> RunRecord:
    return RunRecord(config, "a run", num_steps=5, num_done=2, files={"metrics": ("step", 2)}, **options)


def test_a_record_keeps_lines_up_to_where_a_run_goes_on_and_ends_with_a_summary(tmp_path: Path, capsys) -> None:
    config = config_of(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(5)))
    (tmp_path / "summary.json").write_text("{}")
    record = record_of(config, first_event=2)
    assert not (tmp_path / "summary.json").exists()  # of before
    with record:
        record.write("metrics", {"step": 3, "loss": float("nan")})
        record.plot({"loss": 1.0, "time": float("nan")}, "train/", 3)
        record.step()
        record.tell("as it goes")
    record.close({"steps": 5})
    assert [line["step"] for line in read_json_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 5 and summary["versions"]["torch"] and summary["config"]["host"] == "colossalai"
    assert json.loads((tmp_path / "config.json").read_text())["total_steps"] == 5
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    said = capsys.readouterr().out
    assert said == "a run\nas it goes\n"
    with record_of(config_of(tmp_path, "output.progress=false")) as silent:
        silent.tell("nothing")
    assert capsys.readouterr().out == ""


def test_in_a_log_a_record_tells_how_many_steps_are_done(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 1e-3)
    lines: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(RunRecord, "tell", lambda self, what: lines.put(what))
    for shown in ("true", "false"):
        with record_of(config_of(tmp_path, f"output.progress={shown}")) as record:
            record.step()
            while shown == "true" and not lines.get(timeout=60).startswith("steps: 3 of 5, "):
                pass
    assert "steps" not in "".join(list(lines.queue)[-1:])  # the title of the silent one


def test_what_cannot_be_written_ends_no_training_but_the_summary_is_an_error(tmp_path: Path, caplog) -> None:
    record = record_of(config_of(tmp_path))
    with record, files_of_at_most(0):
        record.write("metrics", {"step": 3})
        record.write("metrics", {"step": 4})
    assert [text.partition("metrics.jsonl ")[2][:25] for text in caplog.messages] == ["is incomplete from step 3"]
    with files_of_at_most(0):
        record.close({"steps": 5})
    assert 'it would say {"steps": 5}' in caplog.messages[-1] and not list(tmp_path.glob("summary*"))
    (tmp_path / "metrics.jsonl").write_text("no line\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1"):
        record_of(config_of(tmp_path))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    write_parquet(folder / "train.parquet", 35)
    write_parquet(folder / "test.parquet", 10)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("launcher", "status"), [(ONE_NODE, 130), (TORCHRUN, 1)])
def test_ctrl_c_says_in_one_line_how_to_go_on(pictures: Path, tmp_path: Path, launcher: list[str], status: int) -> None:
    output = tmp_path / "run"
    ended, said = interrupted([*launcher, *long_run(pictures, output)], output / "metrics.jsonl", 2)
    assert ended == status, said
    (line,) = [line for line in said if line.startswith("interrupted: ")]
    assert "the same command with --resume goes on after epoch" in line
    assert launcher is TORCHRUN or not any("Traceback" in line for line in said)


@pytest.mark.slow
def test_a_mistake_is_one_line_of_each_rank_and_status_2(tmp_path: Path) -> None:
    command = [*ONE_NODE, "-m", "vit_examples.train", f"--output={tmp_path}", "--data=/nowhere/at/all"]
    ended = launched(*command)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("set-up, ")]
    assert ended.returncode == 2 and lines and all(line.startswith("error (rank ") for line in lines), ended.stderr


def test_a_run_of_ranks_that_differ_is_refused(run_ranks, tmp_path: Path) -> None:
    from vit_examples.harness.run_folder import begin_run

    def check(rank: int, group: Any) -> str:
        with ExitStack() as held, pytest.raises(ValueError) as refused:
            begin_run(config_of(tmp_path, f"training.seed={rank}"), {}, group, held, resume=False)
        return str(refused.value)

    assert run_ranks(check, 2) == ["the ranks do not agree on the configuration"] * 2
