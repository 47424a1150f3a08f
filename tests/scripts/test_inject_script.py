"""scripts/inject_straggler.py slows training scripts that know nothing of it."""

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "inject_straggler.py"

#: Five products a step: two forward, two for weights and one for the input of the second layer in backward.
TRAINING = """
import sys
import torch, torch.distributed as dist
from helper import NUM_STEPS
assert __name__ == "__main__" and sys.argv[1:] == ["--width", "8"], (__name__, sys.argv)
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(NUM_STEPS):
    model(torch.ones(4, 8)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
dist.destroy_process_group()
print("trained")
"""


def load_script():
    spec = importlib.util.spec_from_file_location("inject_straggler", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["inject_straggler"] = module
    spec.loader.exec_module(module)
    return module


inject_straggler = load_script()


@pytest.fixture
def main(monkeypatch):
    """The script's main, as rank 0 of two."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return lambda *arguments: inject_straggler.main([str(argument) for argument in arguments])


def write(path, text):
    path.write_text(text)
    return path


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.few(1)
@pytest.mark.exhaustive  # by real time, which other work on the machine changes
@pytest.mark.parametrize("how", ["script", "module"])
def test_torchrun_slows_a_plain_script_epoch_by_epoch(tmp_path, how):
    config = write(tmp_path / "inject.yaml", "{chi: 2.0, schedule: round_robin, iters_per_epoch: 2}")
    write(tmp_path / "train.py", TRAINING)
    write(tmp_path / "helper.py", "NUM_STEPS = 6")
    target = ["train.py"] if how == "script" else ["-m", "train"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, SCRIPT, "--config", config, *target, "--width", "8"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2
    lines = [line for line in done.stdout.splitlines() if "inject_straggler" in line]
    assert sum("one of the 2 ranks in turn has χ = 2" in line for line in lines) == 2
    # Epochs of two steps: rank 0 is slow in the first and third, rank 1 in the second.
    assert any("rank 0] 20 products slowed" in line for line in lines), lines
    assert any("rank 1] 10 products slowed" in line for line in lines), lines


def test_a_line_is_written_whole(tmp_path, main, monkeypatch):
    """Ranks share their standard output: a line in two writes is one into which another rank may write its own."""

    class Terminal(io.StringIO):
        def write(self, text):
            written.append(text)
            return len(text)

    written = []
    monkeypatch.setattr(sys, "stdout", Terminal())
    main("--config", write(tmp_path / "inject.yaml", "chi: {0: 2}"), write(tmp_path / "train.py", ""))
    assert len(written) == 2
    assert all(text.startswith("[inject_straggler rank 0]") and text.endswith("\n") for text in written)


@pytest.mark.slow
def test_an_exception_keeps_its_traceback_and_the_summary_is_said(tmp_path):
    config = write(tmp_path / "inject.yaml", "chi: {0: 2}")
    failing = write(
        tmp_path / "failing.py", "import torch\ntorch.ones(2, 2) @ torch.ones(2, 2)\nraise KeyError('lost')\n"
    )
    command = [sys.executable, SCRIPT, "--config", config, failing]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert f'File "{failing}", line 3, in <module>' in done.stderr
    assert done.stderr.strip().endswith("KeyError: 'lost'")
    assert "1 products slowed" in done.stdout


def test_dry_run_says_what_would_be_slow_and_runs_nothing(tmp_path, main, capsys):
    config = write(tmp_path / "inject.yaml", "{chi: {0: 0, 1: 4.5}, scope: all, tp_size: 2}")
    main("--config", config, "--dry-run", tmp_path / "missing.py")
    expected = "[inject_straggler rank 0] rank 1 in each block of 2 has χ = 4.5 (scope all)\n"
    assert capsys.readouterr().out == expected


def test_ranks_count_within_blocks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "6")
    place = inject_straggler.Place
    assert place.from_environment(None) == place(global_rank=6, rank=6, num_ranks=8)
    assert place.from_environment(4) == place(global_rank=6, rank=2, num_ranks=4)


def test_only_the_first_optimizer_counts_epochs():
    config = inject_straggler.InjectionConfig.of({"chi": 3.0, "schedule": "round_robin", "iters_per_epoch": 2})
    weights = torch.nn.Linear(2, 2)
    first, second = (torch.optim.SGD(weights.parameters()) for _ in range(2))
    chis = []
    with inject_straggler.Injection(config, inject_straggler.Place(1, 1, 3)) as injection:
        for _ in range(5):
            first.step()
            second.step()
            chis.append(injection.chi)
    assert chis == [1.0, 3.0, 3.0, 1.0, 1.0]


def test_the_example_is_right(main, capsys):
    main("--config", ROOT / "scripts" / "inject_straggler.example.yaml", "--dry-run", "train.py")
    assert "rank 1 has χ = 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chi: {0: 2}\nskew: 3", "unknown key 'skew': allowed are ['chi', 'schedule', 'scope'"),
        (
            "{chii: {0: 2}, scope: all}",
            "unknown key 'chii' (did you mean 'chi'?): allowed are ['chi', 'schedule'",
        ),
        ("schedule: static", "chi is missing"),
        ("[1, 2]", "expected a mapping"),
        ("chi: {2: 2}", "rank 2 is not one of the group's 2: allowed are 0 to 1"),
        ("chi: {0: 0.5}", "at least 1"),
        ("{chi: 2, schedule: random}", "schedule='random' is not allowed: choose one of ['static', 'round_robin']"),
        ("{chi: 2, schedule: round_robin}", "needs iters_per_epoch"),
        ("{chi: {0: 2}, schedule: round_robin, iters_per_epoch: 1}", "one number is needed"),
        ("{chi: {0: 2}, iters_per_epoch: 0}", "iters_per_epoch=0 is not allowed"),
        ("{chi: {0: 2}, tp_size: 3}", "tp_size=3 is not allowed: it must divide the 2 ranks"),
        ("{chi: {1: 4.0}, stage_size: 4}", "stage_size=4 is not allowed: it must divide the 2 ranks"),
        ("{chi: {0: 4.0}, stage_size: 1, tp_size: 2}", "tp_size=2 and stage_size=1 do not go together"),
    ],
)
def test_bad_yaml_is_named(tmp_path, main, capsys, text, message):
    config = write(tmp_path / "bad.yaml", text)
    with pytest.raises(SystemExit) as ended:
        main("--config", config, tmp_path / "train.py")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error and "bad.yaml" in error


def test_what_is_missing_is_named(tmp_path, main, monkeypatch, capsys):
    config = write(tmp_path / "inject.yaml", "chi: {1: 2}")

    def said(*arguments):
        with pytest.raises(SystemExit) as ended:
            main("--config", *arguments)
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert f"{tmp_path}/none.yaml" in said(tmp_path / "none.yaml", "train.py")
    assert f"{tmp_path}/none.py: no such file; it is the training script" in said(config, tmp_path / "none.py")
    monkeypatch.delenv("WORLD_SIZE")
    assert "run it under torchrun" in said(config, "train.py")


def test_chi_may_be_of_stages_of_several_ranks(main, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "6")
    config = write(tmp_path / "inject.yaml", "{chi: {1: 4.0}, stage_size: 2}")
    for rank, is_slow in enumerate((False, False, True, True, False, False)):
        place = inject_straggler.Place(rank, rank // 2, 3)
        monkeypatch.setenv("RANK", str(rank))
        assert inject_straggler.Place.from_environment(stage_size=2) == place
        assert (
            inject_straggler.InjectionConfig.of({"chi": {1: 4.0}}).chi_in(0, 3).get(place.rank, 1.0) == 4.0
        ) == is_slow
        main("--config", config, "--dry-run", "train.py")
        printed = capsys.readouterr().out
        assert ("stage 1 has χ = 4" in printed) == (is_slow or rank == 0)
