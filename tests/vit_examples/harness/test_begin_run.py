"""How a run of any program takes its output folder and finds what to go on from, all ranks alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from vit_examples.config import RunConfig
from vit_examples.config_file import READER, load_config
from vit_examples.harness.begin_run import Begun, begin_run
from vit_examples.harness.checkpoint_files import SavedState
from vit_examples.harness.checkpoint_folders import CheckpointFolders
from vit_examples.harness.run_folder import claimed


@dataclass(frozen=True)
class State(SavedState):
    folders: ClassVar[CheckpointFolders] = CheckpointFolders("epoch", 4)

    @property
    def number(self) -> int:
        return 1


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return load_config("demo", [f"output.folder={folder}", *overrides])


def begun(group: Any, config: RunConfig, *, resume: bool = False, **digests: str) -> Begun[State]:
    return begin_run(READER, config, group, layout={}, kind=State, resume=resume, digests=digests)


def refused(group: Any, config: RunConfig, *, resume: bool = False, **digests: str) -> str:
    with pytest.raises(ValueError) as refusal:
        begun(group, config, resume=resume, **digests)
    return str(refusal.value)


def test_the_first_rank_holds_the_folder_for_all(run_ranks, tmp_path: Path) -> None:
    config = config_of(tmp_path)

    def check(rank: int, group: Any) -> str:
        with begun(group, config).held:
            said = refused(group, config)
        with begun(group, config).held:  # free again
            return said

    (said,) = set(run_ranks(check, 2))
    assert said.startswith(f"output.folder={tmp_path}: another run is writing there")


def test_nobody_looks_into_the_folder_before_the_first_rank_has_taken_it(
    run_ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in it may be another run's that is writing there."""
    config = config_of(tmp_path)

    def look(*_: Any) -> None:
        pytest.fail("looked into it")

    def check(rank: int, group: Any) -> str:
        monkeypatch.setattr(CheckpointFolders, "newest", look)
        return refused(group, config)

    with claimed(config):
        assert all("another run is writing there" in said for said in run_ranks(check, 2))


def test_an_earlier_run_without_checkpoints_is_not_overwritten(
    run_ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path)

    def check(rank: int, group: Any) -> Any:
        with begun(group, config).held as held:
            held.callback((tmp_path / "metrics.jsonl").touch)
        said = refused(group, config)
        run = begun(group, config, resume=True)
        run.held.close()
        return said, run.saved

    (answer,) = set(run_ranks(check, 2))
    assert answer == (f"{tmp_path} holds an earlier run: add --resume, or choose another --output", None)
    assert capfd.readouterr().out == f"no checkpoint in {tmp_path}/checkpoints: starting anew\n"


@pytest.mark.parametrize(
    ("settings", "digests", "message"),
    [
        (("training.seed=5", "training.seed=6"), ({}, {}), "agree on the configuration; those that do: [[0], [1]]"),
        (("training.seed=5",) * 2, ({"text": "a"}, {"text": "b"}), "agree on text; those that do: [[0], [1]]"),
    ],
)
def test_ranks_that_differ_are_refused(
    run_ranks, tmp_path: Path, settings: tuple[str, str], digests: tuple[Mapping[str, str], ...], message: str
) -> None:
    def check(rank: int, group: Any) -> str:
        return refused(group, config_of(tmp_path, settings[rank]), **digests[rank])

    assert all(message in said for said in run_ranks(check, 2))


def test_ranks_that_see_different_checkpoints_say_which(
    run_ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(rank: int, group: Any) -> str:
        checkpoint = tmp_path / "checkpoints" / "epoch-0001" if rank == 0 else None
        monkeypatch.setattr(CheckpointFolders, "newest", lambda *_: checkpoint)
        monkeypatch.setattr("vit_examples.harness.begin_run.read_saved_state", lambda *_: State({}))
        return refused(group, config_of(tmp_path), resume=True)

    (said,) = set(run_ranks(check, 2))
    assert said == "the ranks do not agree on the newest checkpoint: rank 0: epoch-0001; rank 1: None"
