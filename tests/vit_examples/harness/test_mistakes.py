"""A mistake of the user's is said once for all ranks that have made it, and always if one rank alone has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from helpers.processes import forked_training
from helpers.runs import ONE_NODE, TORCHRUN, launched

from vit_examples.train import main


def mistakes(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error")]


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("launcher", [ONE_NODE, TORCHRUN], ids=["one_node", "torchrun"])
def test_what_all_ranks_find_is_said_once(tmp_path: Path, launcher: list[str]) -> None:
    arguments = ["--config=demo", "--host=torch", f"--output={tmp_path}", f"--data={tmp_path}/nowhere"]
    done = launched(*launcher, "-m", "vit_examples.train", *arguments)
    assert len(mistakes(done.stderr)) == 1, done.stderr
    assert "/nowhere': no such folder" in done.stderr
    if launcher is ONE_NODE:
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1


def test_a_wrong_flag_is_said_once(tmp_path: Path) -> None:
    done = forked_training(["--cofnig=demo"], tmp_path / "said")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "unrecognized arguments: --cofnig=demo" in done.stderr
    assert "--help" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--data=/nowhere", "data.source='/nowhere': no such folder"),  # while rank 0 waits for it
        ("--mode=fast", "balance.mode='fast'"),
    ],
)
def test_what_one_rank_alone_finds_is_said(tmp_path: Path, wrong: str, message: str) -> None:
    """Rank 1 has other arguments than rank 0, which waits for it."""

    def differ(arguments: Sequence[str]) -> None:
        main([*arguments, *([wrong] if os.environ["RANK"] == "1" else [])])

    arguments = ["--config=demo", "--host=torch", f"--output={tmp_path / 'run'}"]
    done = forked_training(arguments, tmp_path / "said", main=differ)
    assert done.returncode != 0
    said = mistakes(done.stderr)
    assert len(said) == 1 and said[0].startswith("error (rank 1): ") and message in said[0], done.stderr
