"""What --dry-run checks and says."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from training_runs import refused

from vit_examples.train import main


def test_a_dry_run_counts_parameters_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--config=vit_1b", "--ranks=8", "--dry-run"])
    printed = capsys.readouterr().out
    assert "1,208,870,928" in printed
    assert "the configuration is sound" in printed


def test_a_dry_run_speaks_on_rank_0_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    main(["--config=demo", "--dry-run"])
    assert capsys.readouterr().out == ""


def test_every_row_of_memory_is_in_gib(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--config=vit_1b", "--ranks=8", "--dry-run"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    memory = {name.strip(): size.strip() for _, name, size, _ in (row.split("│") for row in rows[2:])}
    assert memory["AdamW moments, fp32"] == f"{8 * 151_576_578 / 2**30:.3f} GiB"
    parts = [float(size.removesuffix(" GiB")) for size in list(memory.values())[:5]]
    assert float(memory["together"].removesuffix(" GiB")) == pytest.approx(sum(parts), abs=0.003)
    assert len(memory) == 7 and all(size.endswith(" GiB") for size in memory.values())


@pytest.mark.parametrize("ranks", ["0", "-1"])
def test_a_dry_run_needs_a_rank(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--ranks {ranks}: at least 1 is needed" in refused(["--dry-run", f"--ranks={ranks}"], capsys)


def test_a_dry_run_says_whether_the_data_are_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZERORESIZE_CIFAR10", raising=False)
    file = tmp_path / "train.parquet"
    file.touch()
    for source, line in {
        "${ZERORESIZE_CIFAR10}": "warning: data: ${ZERORESIZE_CIFAR10} not found on this machine: "
        "the environment variable ZERORESIZE_CIFAR10 is not set",
        f"{tmp_path}/none": f"warning: data: {tmp_path}/none not found on this machine: no such folder",
        str(file): f"warning: data: {file} is a file, not a folder",
        str(tmp_path): f"data: {tmp_path}; the pictures were not opened",
        "some/name": "data: no folder some/name here, so the name of a data set on the Hugging Face hub; "
        "not looked for",
    }.items():
        main(["--config=demo", "--dry-run", f"--data={source}"])
        assert capsys.readouterr().out.splitlines()[0] == line


def test_a_dry_run_refuses_ranks_that_cannot_share_the_heads(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["--config=vit_1b", "--ranks=3", "--dry-run"], capsys)
    assert "model.num_heads=16 is not divisible by the 3" in said
