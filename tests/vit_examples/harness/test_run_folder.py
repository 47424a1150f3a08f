"""An output folder is one run's alone as long as that lives, and is known to be writable before anything is trained."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import pytest

from vit_examples.config import RunConfig
from vit_examples.config_file import READER, load_config
from vit_examples.harness.file_lock import locked
from vit_examples.harness.run_folder import changed_settings, claimed, flat_settings


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return load_config("demo", [f"output.folder={folder}", "output.save_every=1", *overrides])


def test_a_second_run_is_refused_and_may_come_when_the_first_has_ended(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    refusal = rf"output.folder={tmp_path}/run: another run is writing there .*run\.lock is locked"
    with claimed(config):
        with pytest.raises(ValueError, match=refusal), claimed(config):
            pass
        with pytest.raises(ValueError, match=refusal), claimed(config):  # the refused one let nothing go
            pass
    with claimed(config):
        pass


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_ends_with_its_process_however_that_ends(tmp_path: Path, end: signal.Signals) -> None:
    fork = multiprocessing.get_context("fork")
    has_it = fork.Event()

    def hold() -> None:
        with locked(tmp_path / "lock", "taken"):
            has_it.set()
            signal.pause()

    holder = fork.Process(target=hold)
    holder.start()
    try:
        assert has_it.wait(30)
        with pytest.raises(ValueError, match=r"^taken \(.*/lock is locked\)"), locked(tmp_path / "lock", "taken"):
            pass
    finally:
        os.kill(holder.pid, end)
        holder.join(30)
    with locked(tmp_path / "lock", "taken"):
        pass


def test_a_program_that_is_started_within_does_not_keep_the_lock(tmp_path: Path) -> None:
    import subprocess

    with locked(tmp_path / "lock", "taken"):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with locked(tmp_path / "lock", "taken"):
            pass
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("kind", ["symbolic", "dangling"])
def test_a_link_in_the_place_of_a_lock_is_refused_and_its_target_left_alone(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    if kind == "symbolic":
        target.write_text("precious")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(ValueError, match=f"{tmp_path}/lock: cannot be locked: "), locked(tmp_path / "lock", "taken"):
        pass
    assert target.read_text() == "precious" if kind == "symbolic" else not target.exists()


def test_a_file_in_the_place_of_a_lock_keeps_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("precious")
    with locked(tmp_path / "lock", "taken"):
        pass
    assert (tmp_path / "lock").read_text() == "precious"


def test_a_file_system_without_locks_is_told_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path / "lock", "taken"):
        pass
    assert caplog.messages == [
        f"{tmp_path}/lock: its file system has no locks: nothing keeps others from writing there, too"
    ]


@pytest.mark.parametrize("place", ["run", "run/below", "run/checkpoints"])
def test_a_file_where_a_folder_is_needed_is_told_at_the_start(tmp_path: Path, place: str) -> None:
    file = tmp_path / ("run/checkpoints" if place == "run/checkpoints" else "run")
    file.parent.mkdir(exist_ok=True)
    file.touch()
    folder = tmp_path / (place if place == "run/below" else "run")
    with (
        pytest.raises(ValueError, match=f"^output.folder={folder}: cannot be written to: .*{file}"),
        claimed(config_of(folder)),
    ):
        pass


def test_a_folder_that_cannot_be_written_to_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the lock is there from before."""
    with claimed(config_of(tmp_path)):
        pass

    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    tmp_path.chmod(0o500)
    if os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    try:
        with (
            pytest.raises(ValueError, match=f"^output.folder={tmp_path}: cannot be written to: .*{tmp_path}"),
            claimed(config_of(tmp_path)),
        ):
            pass
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("content", ["[]", '"text"', '{"host"', "\xff", '{"training": [], "host": {"a": 1}}'])
def test_damaged_settings_of_before_are_not_compared(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    config = config_of(tmp_path)
    assert changed_settings(config, flat_settings(READER.to_dict(config))) == []


def test_settings_that_changed_since_the_last_start_are_named(tmp_path: Path) -> None:
    before = load_config("demo", [f"output.folder={tmp_path}", "straggler={kind: sleep, chi: {1: 4.0}}"])
    (tmp_path / "config.json").write_text(json.dumps({**READER.to_dict(before), "total_steps": 60}))
    assert changed_settings(before, flat_settings(READER.to_dict(before))) == []
    changes = ["data.train_size=300", "straggler.chi={0: 2.0}", "host=torch", "output.log_every=7"]
    after = load_config("demo", [f"output.folder={tmp_path}", "straggler.kind=sleep", *changes])
    assert changed_settings(after, flat_settings(READER.to_dict(after))) == [
        'host "colossalai" → "torch"',
        "data.train_size 4000 → 300",
        'straggler.chi {"1": 4.0} → {"0": 2.0}',
    ]
