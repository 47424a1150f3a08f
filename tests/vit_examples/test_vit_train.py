"""Training runs of two ranks, each host: as users start them, with torchrun; interrupted, resumed, and refused.

What a training computes, however it was started, is seen in ranks that are forks of this process.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

import torch
from helpers.faults import full_disk_on_rank_1, put_into_planner_data, saying_status, sigterm_at, writable_by_all
from helpers.processes import forked_training
from helpers.runs import refused, write_parquet

import vit_examples.train
import zeroresize as zr
from vit_examples import demo
from vit_examples.harness.checkpoints import newest
from vit_examples.step_times import seconds_by_process, timed_steps, timing
from zeroresize.utils.files import read_json_lines

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 8  # two epochs of four


def die_in_second_epoch() -> None:
    """On rank 1, in the third step, as by a bug in a user's code."""
    backward, calls = vit_examples.train.backward, []

    def dying_backward(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 7 and os.environ["RANK"] == "1":
            raise RuntimeError("rank 1 has had enough")
        return backward(*arguments)

    vit_examples.train.backward = dying_backward


#: Death under torchrun.
DYING_RUN = f"""
import os
from typing import Any
import torch
import vit_examples.train
import zeroresize as zr

{inspect.getsource(die_in_second_epoch)}
die_in_second_epoch()
vit_examples.train.main()
"""


def micro_arguments(pictures: Path, output: Path, *overrides: str) -> list[str]:
    settings = [
        "model={hidden_size: 32, depth: 1, num_heads: 2, num_labels: 10, image_size: 32, patch_size: 8}",
        "data={train_size: null, test_size: null}",
        "training={epochs: 2, batch_size: 8, lr: 0.003, warmup_steps: 2, grad_clip: 0.5}",
        "straggler={schedule: round_robin, chi: 2.0, pin_ratio: 0.5}",
        "balance={mode: zero-rd, update_every: 2}",
        f"output={{folder: '{output}', log_every: 1, save_every: 1}}",
        *overrides,
    ]
    return ["--config=demo", *(f"--set={setting}" for setting in settings), f"--set=data.source={pictures}"]


def torchrun(*program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
    return subprocess.run(command, env=environment, **options, capture_output=True, text=True, timeout=240, check=False)


def train(folder: Path, *arguments: str) -> str:
    """What the run says on its standard output; its ranks are forks of this process."""
    finished = forked_training(arguments, folder)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def lines_of(output: Path, kind: str) -> list[dict[str, Any]]:
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def losses_of(output: Path) -> list[float]:
    steps = lines_of(output, "step")
    assert [line["step"] for line in steps] == list(range(NUM_STEPS))
    return [line["loss"] for line in steps]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_parquet(folder / "train.parquet", 35)
    write_parquet(folder / "test.parquet", 10)
    return folder


@pytest.fixture(params=["torch", pytest.param("colossalai", marks=pytest.mark.colossalai)])
def host(request: pytest.FixtureRequest) -> str:
    """Its name; Colossal-AI is imported here, from which forked ranks inherit it."""
    if request.param == "colossalai":
        request.getfixturevalue("colossalai_vit_modules")
    return request.param


@pytest.fixture(scope="module")
def finished_runs(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Output folders of finished runs by host, filled by :func:`finished_run`."""
    return {"": tmp_path_factory.mktemp("runs")}


def finished_run(host: str, pictures: Path, finished_runs: dict[str, Path]) -> Path:
    if host not in finished_runs:
        output = finished_runs[""] / host
        arguments = micro_arguments(pictures, output, f"host={host}")
        finished = forked_training([*arguments, "--resume"], finished_runs[""] / f"{host} said", lambda: os.umask(0))
        assert finished.returncode == 0, finished.stdout + finished.stderr
        assert finished.stdout.count(f"no checkpoint in {output}/checkpoints: starting anew\n") == 1
        finished_runs[host] = output
    return finished_runs[host]


@pytest.mark.timeout(300)
def test_a_run_leaves_its_numbers(host: str, pictures: Path, finished_runs: dict[str, Path]) -> None:
    output = finished_run(host, pictures, finished_runs)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == summary["steps_timed"] == NUM_STEPS and summary["ranks"] == 2
    assert summary["step_ms"] > 0 and 0 <= summary["test_accuracy"] <= 1
    assert summary["epoch_s"] == pytest.approx(4 * summary["mean_step_ms"] / 1e3)
    assert summary["images_per_s"] == pytest.approx(8 / (summary["mean_step_ms"] / 1e3))
    assert isinstance(summary["commit"], str) and summary["versions"]["torch"]
    assert list((output / "tensorboard").iterdir())
    epochs = lines_of(output, "epoch")
    assert [line["ratios"] for line in epochs] == [[[0.5, 0.0]] * 4, [[0.0, 0.5]] * 4]  # pinned in turn
    kept = seconds_by_process(timed_steps(lines_of(output, "step")))
    assert [len(seconds) for seconds in kept] == [NUM_STEPS]
    assert timing(kept, settle_steps=20)["step_ms"] == pytest.approx(summary["step_ms"], abs=1e-3)
    assert not list(output.glob("checkpoints/*.tmp"))
    assert writable_by_all(output) == []  # whatever the umask


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_dying_rank_ends_the_job_and_the_resumed_run_equals_the_uninterrupted_one(
    host: str, pictures: Path, finished_runs: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "dying.py").write_text(DYING_RUN)
    arguments = micro_arguments(pictures, tmp_path / "run", f"host={host}")
    died = torchrun(str(tmp_path / "dying.py"), *arguments)
    assert "dying_backward" in died.stderr  # the rank's own traceback
    require_death_in_second_epoch(died, tmp_path / "run")

    train(tmp_path / "said", *arguments, "--resume", "--set=timeout_s=500")
    assert losses_of(tmp_path / "run") == losses_of(finished_run(host, pictures, finished_runs))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps_timed"] == NUM_STEPS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_to_one_rank_saves_within_the_epoch_and_the_resumed_run_equals_the_uninterrupted_one(
    host: str, pictures: Path, finished_runs: dict[str, Path], tmp_path: Path
) -> None:
    through, output = finished_run(host, pictures, finished_runs), tmp_path / "run"
    arguments = micro_arguments(pictures, output, f"host={host}")
    before = functools.partial(sigterm_at, 7, vit_examples.train, "backward", 2)  # from a scheduler and torchrun
    ended = forked_training(arguments, tmp_path / "ended", before)
    assert ended.returncode == 0, ended.stderr
    checkpoint = output / "checkpoints" / "epoch-00000001-step-00000007"
    assert (
        f"SIGTERM: ended after step 7; the same command with --resume goes on after epoch 1, step 7, from {checkpoint}"
        in ended.stderr
    )
    assert newest(output / "checkpoints") == checkpoint and not (output / "summary.json").exists()

    train(tmp_path / "said", *arguments, "--resume")
    assert losses_of(output) == losses_of(through)
    by_run = [
        [{**line, "step_ms": 0, "mean_step_ms": 0} for line in lines_of(run, "epoch")] for run in (output, through)
    ]
    assert by_run[0] == by_run[1]
    assert json.loads((output / "summary.json").read_text())["steps_timed"] == NUM_STEPS


@pytest.mark.slow
@pytest.mark.parametrize(("step", "epoch"), [(4, 0)])  # at an epoch's end, before its evaluation
def test_sigterm_to_one_rank_ends_all_after_the_same_step_and_the_resumed_run_equals_the_uninterrupted_one(
    pictures: Path, finished_runs: dict[str, Path], tmp_path: Path, step: int, epoch: int
) -> None:
    output = tmp_path / "run"
    arguments = micro_arguments(pictures, output, "host=torch")
    ended = forked_training(arguments, tmp_path / "ended", lambda: sigterm_at(step, vit_examples.train, "backward"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    checkpoint = output / "checkpoints" / f"epoch-{epoch:08}-step-{step:08}"
    on = f"the same command with --resume goes on after epoch {epoch}, step {step}, from {checkpoint}"
    assert ended.stderr.count(f"SIGTERM: ended after step {step}; {on}\n") == ended.stderr.count("SIGTERM") == 1
    assert newest(output / "checkpoints") == checkpoint and not (output / "summary.json").exists()
    assert [line["step"] for line in lines_of(output, "step")] == list(range(step))

    train(tmp_path / "said", *arguments, "--resume")
    whole = finished_run("torch", pictures, finished_runs)
    assert losses_of(output) == losses_of(whole)
    kept = ("epoch", "step", "loss", "test_accuracy", "ratios")
    resumed, uninterrupted = (
        [[line[key] for key in kept] for line in lines_of(run, "epoch")] for run in (output, whole)
    )
    assert resumed == uninterrupted
    assert json.loads((output / "summary.json").read_text())["steps_timed"] == NUM_STEPS


def test_all_ranks_have_the_status_of_sigterm_where_its_checkpoint_cannot_be_saved(
    pictures: Path, tmp_path: Path
) -> None:
    def before() -> None:
        full_disk_on_rank_1()
        sigterm_at(2, vit_examples.train, "backward")

    arguments = micro_arguments(pictures, tmp_path / "run", "host=torch")
    ended = forked_training(arguments, tmp_path / "ended", before, saying_status(vit_examples.train.main))
    assert ended.returncode == 0 and ended.stdout.count("status 143, left\n") == 2, ended.stdout + ended.stderr
    assert "SIGTERM: ended after step 2, not saved; no checkpoint is written yet" in ended.stderr
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("colossalai_vit_modules")
def test_both_hosts_train_alike(pictures: Path, finished_runs: dict[str, Path]) -> None:
    by_host = [losses_of(finished_run(host, pictures, finished_runs)) for host in ("torch", "colossalai")]
    assert by_host[0] == pytest.approx(by_host[1], rel=1e-4)


@pytest.mark.timeout(300)
def test_accumulation_and_checkpointing_of_activations_change_nothing(
    pictures: Path, finished_runs: dict[str, Path], tmp_path: Path
) -> None:
    changes = ("host=torch", "training.accumulation=2", "training.activation_checkpointing=true")
    train(tmp_path / "said", *micro_arguments(pictures, tmp_path / "run", *changes))
    assert losses_of(tmp_path / "run") == pytest.approx(
        losses_of(finished_run("torch", pictures, finished_runs)), rel=1e-4
    )


def require_death_in_second_epoch(died: subprocess.CompletedProcess[str], output: Path) -> None:
    """By :func:`die_in_second_epoch`; the first epoch is in a checkpoint."""
    assert died.returncode != 0
    assert "RuntimeError: rank 1 has had enough" in died.stderr
    assert newest(output / "checkpoints").name == "epoch-00000001"


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_on_a_full_disk_trains_to_its_end_and_says_what_it_could_not_write(
    host: str, pictures: Path, finished_runs: dict[str, Path], tmp_path: Path
) -> None:
    """Files grow to 3,000 bytes here, so the summary fits and checkpoints, metrics and events do not."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    arguments = micro_arguments(pictures, tmp_path / "run", f"host={host}")
    run = torchrun("-m", "vit_examples.train", *arguments, preexec_fn=limit)
    assert run.returncode == 0, run.stdout + run.stderr
    before, now = (
        json.loads((output / "summary.json").read_text())
        for output in (finished_run(host, pictures, finished_runs), tmp_path / "run")
    )
    assert [now[key] for key in ("steps", "test_accuracy")] == [before[key] for key in ("steps", "test_accuracy")]
    for epoch in (1, 2):
        assert f"no checkpoint of epoch {epoch} could be written (the newest is none): rank " in run.stderr
    assert run.stderr.count("metrics.jsonl is incomplete from step ") == 1
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_resumed_while_a_straggler_is_relieved_has_its_units_away_at_once(
    host: str, pictures: Path, tmp_path: Path, cheap_moves: None
) -> None:
    """Its checkpoint has whole tensors, its losses are those of a run that went through."""
    mlp_size = 4096
    slow = "straggler={kind: sleep, chi: {1: 40.0}}"
    settings = (f"host={host}", slow, f"model.mlp_size={mlp_size}", "balance={mode: exact, update_every: 1}")
    train(tmp_path / "said", *micro_arguments(pictures, tmp_path / "through", *settings))

    arguments = micro_arguments(pictures, tmp_path / "run", *settings)
    died = forked_training(arguments, tmp_path / "died", die_in_second_epoch)
    require_death_in_second_epoch(died, tmp_path / "run")
    saved_at = 4
    before = {line["step"]: line for line in read_json_lines(tmp_path / "run" / "balance-rank1.jsonl")}
    assert before[saved_at]["owned"] < 0.7 and before[saved_at]["units"]["neurons"] < mlp_size / 4
    checkpoint = newest(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    tensors = zr.CheckpointReader(checkpoint).read_metadata().state_dict_metadata.values()
    assert {length for entry in tensors for length in getattr(entry, "size", ()) if length > 1000} == {mlp_size}

    resumed = forked_training([*arguments, "--resume"], tmp_path / "resumed")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    said = (resumed.stdout + resumed.stderr).splitlines()
    assert any(line.startswith(f"step {saved_at}: ") and " move to rank 0: " in line for line in said), said
    after = read_json_lines(tmp_path / "run" / "balance-rank1.jsonl")
    (first,) = [line for line in after if line["step"] == saved_at + 1]
    assert first["moved_bytes"] > 0 and first["owned"] < 0.7
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(tmp_path / "through"), rel=1e-4)


@pytest.fixture
def as_rank_0_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that torchrun makes, for mistakes found before the ranks meet."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.timeout(300)
def test_a_checkpoint_of_another_layout_or_with_code_in_it_is_refused(
    pictures: Path, finished_runs: dict[str, Path], tmp_path: Path
) -> None:
    output, marker = tmp_path / "run", tmp_path / "marker"
    shutil.copytree(finished_run("torch", pictures, finished_runs), output)
    more = (*micro_arguments(pictures, output, "host=torch", "training.epochs=3"), "--resume")

    def refused_by(name: str, *arguments: str) -> str:
        ended = forked_training(arguments, tmp_path / name)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
        return ended.stderr

    said = refused_by("other", *more, "--set=model.hidden_size=64")
    assert "is of another layout, nothing was loaded" in said and '"hidden_size": 64' in said
    put_into_planner_data(output / "checkpoints" / "epoch-00000002", marker)
    assert "it names posix.system" in refused_by("code", *more) and not marker.exists()


@pytest.mark.usefixtures("as_rank_0_of_2")
def test_missing_data_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(micro_arguments(tmp_path / "nowhere", tmp_path / "run"), capsys)
    assert f"data.source='{tmp_path}/nowhere': no such folder" in said


def test_without_torchrun_the_right_command_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["--config=demo", f"--output={tmp_path}"], capsys)
    assert "torchrun --nproc-per-node 2 -m vit_examples.train`" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_compares_its_runs(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {name: demo.RUNS[name] for name in ("homogeneous", "Baseline")}  # test_vit_demo.py shows the others
    monkeypatch.setattr(demo, "RUNS", runs)
    micro = "model={hidden_size: 32, depth: 1, num_heads: 2, patch_size: 8}"
    data = f"data={{source: '{pictures}'}}"
    overrides = ("host=torch", data, "training.batch_size=8", "training.epochs=1", "balance.update_every=2", micro)
    assert demo.main([f"--output={tmp_path}", *(f"--set={override}" for override in overrides)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row[-1:] == ["%"]] == [name.lower() for name in runs]
    assert "Step time of each run" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_shows_why_a_run_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "RUNS", {"broken": ("model.num_heads=7",)})
    assert demo.main([f"--output={tmp_path}"]) == 1
    assert "model.hidden_size=192 is not divisible by model.num_heads=7" in capsys.readouterr().out
