"""python -m scripts.study: the shipped grids, repeated cells, its table, and what is shown of a cell that failed."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.runs import written
from rich.console import Console

pytest.importorskip("yaml")

from scripts.study import __main__ as study
from scripts.study import jobs
from vit_examples.config import load_config

GRIDS = sorted(Path(study.__file__).with_name("grids").glob("*.yaml"))
RESULTS = Path(study.__file__).parents[2] / "docs" / "results"
PUBLISHED = [grid for grid in GRIDS if (RESULTS / f"{grid.stem}.csv").is_file()]


@pytest.fixture
def micro_study(tmp_path: Path) -> study.Study:
    grid = tmp_path / "grid.yaml"
    grid.write_text("config: demo\ncells:\n  Baseline: {balance.mode: 'off'}\n")
    return study.read_study(grid, tmp_path / "runs")


def stub_training(monkeypatch: pytest.MonkeyPatch, code: int, log: str = "") -> None:
    @contextmanager
    def started(command, log_file, environment):
        with log_file.open("a") as stream:
            stream.write(log)
        if not code:
            (log_file.parent / "summary.json").write_text("{}")
        yield SimpleNamespace(wait=lambda: code)

    monkeypatch.setattr(jobs, "started", started)


def train(of: study.Study, cell: jobs.Cell) -> BaseException | None:
    """Train a cell here; returns why that failed."""
    return jobs.Jobs(cell.folder.parent / "jobs", "debug").submit(of, cell).exception()


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.stem)
def test_shipped_grids_are_sound_and_only_long_runs_write_checkpoints(grid: Path, tmp_path: Path) -> None:
    read = study.read_study(grid, tmp_path)
    assert len({cell.folder for cell in read.cells}) == len(read.cells)
    for cell in read.cells:
        assert (load_config(read.config, cell.overrides).output.save_every > 0) == (cell.epochs > 20)


@pytest.mark.parametrize("grid", PUBLISHED, ids=lambda grid: grid.stem)
def test_published_rows_of_a_shipped_grid_count_as_finished(grid: Path, tmp_path: Path) -> None:
    """Their settings are told in the very same words, so nothing of them runs again."""
    assert study.all_rows(study.read_study(grid, tmp_path), RESULTS / f"{grid.stem}.csv")


def test_a_cell_may_have_a_number_of_ranks_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, trained = tmp_path / "grid.yaml", []
    grid.write_text("config: demo\nranks: 2\ncells:\n  of 2: {}\n  of 4: {ranks: 4, balance.mode: mig}\n")
    read = study.read_study(grid, tmp_path / "runs")
    assert [cell.settings for cell in read.cells] == [
        "{config: demo, ranks: 2}",
        "{balance.mode: mig, config: demo, ranks: 4}",
    ]
    stub_training(monkeypatch, 0)
    monkeypatch.setattr(
        jobs, "train_command", lambda config, overrides, ranks: trained.append((ranks, overrides)) or []
    )
    for cell in read.cells:
        assert train(read, cell) is None
    assert [ranks for ranks, _ in trained] == [2, 4]
    assert not [override for _, overrides in trained for override in overrides if override.startswith("ranks")]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("config: BASE\ncells:\n  Rd: {balance.mode: zero-rd}\n", "cell 'Rd': .*base.yaml: expected sections"),
        ("config: demo\ncells:\n  Rd: {ranks: 0}\n", "cell 'Rd': ranks=0 is not allowed: a whole number of at least 1"),
        ("config: demo\ncells:\n  Rd: {ranks: 5}\n", "cell 'Rd': model.num_heads=12 is not divisible by the 5"),
        ("config: demo\ncells:\n  Rd: {training.seed: 5}\n", r"cell 'Rd': \['training.seed'\] are set by the study"),
        ("config: demo\ncells: [Rd]\n", "'cells' must map names"),
        ("config: demo\n", "'cells' must be given"),
        ("config: demo\ncell: {}\n", "unknown key 'cell'"),
        ("config: demo\ncells:\n  Pri 1/2: {}\n  Pri 1-2: {}\n", "cells 'Pri 1/2' and 'Pri 1-2' would both run in"),
    ],
)
def test_a_wrong_grid_is_refused_by_file_and_cell(tmp_path: Path, grid: str, message: str) -> None:
    path, base = tmp_path / "grid.yaml", tmp_path / "base.yaml"
    base.write_text("[1]")
    path.write_text(grid.replace("BASE", str(base)))
    with pytest.raises(ValueError, match=f"^{path}.*{message}"):
        study.read_study(path, tmp_path / "runs")


def test_a_grid_takes_anothers_cells_and_nothing_else_of_it(tmp_path: Path) -> None:
    small, large = tmp_path / "small.yaml", tmp_path / "large.yaml"
    modes = "{Rd: {balance.mode: zero-rd}, MIG: {balance.mode: mig}}"
    small.write_text(f"config: demo\nranks: 2\nshared: {{training.epochs: 1}}\ncells: {modes}\n")
    large.write_text("config: cifar_small\nranks: 4\nshared: {training.epochs: 7}\ncells: small.yaml\n")
    cells = study.read_study(large, tmp_path / "runs").cells
    settings = {cell.name: load_config("cifar_small", cell.overrides) for cell in cells}
    assert {name: one.balance.mode for name, one in settings.items()} == {"Rd": "zero-rd", "MIG": "mig"}
    assert all(one.training.epochs == 7 for one in settings.values())


def test_what_cells_share_reaches_those_in_whose_mode_it_has_an_effect(tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    text = "config: demo\nshared: {balance.priority: variation}\ncells: {Rd: {balance.mode: zero-rd}"
    grid.write_text(f"{text}, Pri: {{balance.mode: zero-pri}}, Baseline: {{balance.mode: 'off'}}}}\n")
    read = study.read_study(grid, tmp_path / "runs", changes=["balance.ageing=0.0"])
    balance = {cell.name: load_config("demo", cell.overrides).balance for cell in read.cells}
    assert balance["Pri"].priority == "variation" and balance["Pri"].ageing == 0.0
    assert balance["Rd"].mode == "zero-rd"
    assert all("balance.priority: variation" in cell.settings for cell in read.cells)
    with pytest.raises(
        ValueError, match=r"\['balance.paper.num_migrating'\] of 'shared' or --set have no effect in the mode of"
    ):
        study.read_study(grid, tmp_path / "runs", changes=["balance.paper.num_migrating=1", "balance.mode=zero-pri"])
    grid.write_text(f"{text}, RdOwn: {{balance.mode: zero-rd, balance.ageing: 0.0}}}}\n")
    with pytest.raises(ValueError, match=r"cell 'RdOwn': balance\.ageing=0\.0 has no effect with mode='zero-rd'"):
        study.read_study(grid, tmp_path / "runs")


def test_cells_that_differ_in_any_letter_have_folders_of_their_own(tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text("config: demo\ncells:\n  Pri γ=1/2: {}\n  Pri δ γ=1/2: {}\n  ../../x: {}\n")
    folders = [cell.folder.resolve().parent for cell in study.read_study(grid, tmp_path / "runs").cells]
    assert [folder.name for folder in folders][:2] == ["Pri_γ=1-2", "Pri_δ_γ=1-2"]
    assert {folder.parent for folder in folders} == {(tmp_path / "runs/grid").resolve()}


def checkpoint(cell: jobs.Cell, settings: str, epochs: int = 1) -> Path:
    """What a run that was cut off after so many epochs left."""
    folder = cell.folder / f"checkpoints/epoch-{epochs:04d}"
    folder.mkdir(parents=True)
    cell.settings_file.write_text(settings)
    return folder


@pytest.mark.parametrize(
    ("epochs", "goes_on"),
    [(1, True), (2, False)],  # after both it ended, and badly: nothing would be left to train if it went on
)
def test_a_run_that_was_cut_off_goes_on_from_its_checkpoint_unless_it_had_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: int, goes_on: bool
) -> None:
    grid, commands = tmp_path / "grid.yaml", []

    @contextmanager
    def started(command, log_file, environment):
        log_file.write_text("")
        commands.append(command)
        finish(cell)
        assert (cell.folder / "checkpoints").exists() == goes_on
        yield SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(jobs, "started", started)
    grid.write_text("config: demo\nshared: {training.epochs: 2}\ncells:\n  Baseline: {}\n")
    read = study.read_study(grid, tmp_path / "runs")
    (cell,) = read.cells
    checkpoint(cell, cell.settings, epochs)
    assert study.run_study(read, tmp_path / "table.csv", Console(quiet=True), jobs.Jobs(tmp_path / "jobs")) == []
    assert ("--resume" in commands[0]) == goes_on
    assert not (cell.folder / "checkpoints").exists()


def test_checkpoints_of_other_settings_are_an_error_before_anything_runs(
    tmp_path: Path, micro_study: study.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = micro_study.cells
    left = checkpoint(cell, "{config: another}")
    monkeypatch.setattr(jobs.Jobs, "submit", lambda *_: pytest.fail("something ran"))
    with pytest.raises(ValueError, match=r"is there with other settings(.|\n)*then .config: another"):
        study.run_study(micro_study, tmp_path / "table.csv", Console(quiet=True), jobs.Jobs(tmp_path / "jobs"))
    assert left.exists()


def test_changes_from_the_command_line_are_every_cells_and_part_of_its_settings(tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text("config: demo\ncells:\n  Rd: {balance.mode: zero-rd, training.epochs: 9}\n  Baseline: {}\n")
    changed = study.read_study(grid, tmp_path, changes=["training.epochs=1", "balance.block=2"])
    for cell in changed.cells:
        config = load_config("demo", cell.overrides)
        assert (config.training.epochs, config.balance.block) == (1, 2)
        assert "training.epochs: 1" in cell.settings
    with pytest.raises(ValueError, match=r"--set training\.epochs: expected section\.key=value"):
        study.read_study(grid, tmp_path, changes=["training.epochs"])


LONG_LOG = [f"line {number}\n" for number in range(40)]


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (
            "hello\nerror (rank 1): a\nerror (rank 0): a\nerror (rank 0): b\nbye\n",
            "a\nb",
        ),
        ("".join(LONG_LOG), "".join(LONG_LOG[10:]).rstrip()),
    ],
)
def test_a_failed_cell_shows_its_mistakes_or_else_the_end_of_its_log(
    micro_study: study.Study, monkeypatch: pytest.MonkeyPatch, log: str, shown: str
) -> None:
    stub_training(monkeypatch, 2, log)
    failure = str(train(micro_study, micro_study.cells[0]))
    assert failure.startswith("cell 'Baseline', seed 0 failed with code 2") and failure.endswith(f"train.log:\n{shown}")


def finish(cell: jobs.Cell, **numbers: Any) -> None:
    cell.folder.mkdir(parents=True, exist_ok=True)
    summary = {"test_accuracy": 0.5, "ranks": 2, "versions": {"torch": "2"}, **numbers}
    (cell.folder / "summary.json").write_text(json.dumps(summary))
    cell.settings_file.write_text(cell.settings)


@pytest.mark.parametrize("is_in_table", [True, False], ids=["row", "folder"])
def test_what_is_finished_with_other_settings_is_no_result_of_this_study(
    tmp_path: Path, micro_study: study.Study, is_in_table: bool
) -> None:
    (cell,) = micro_study.cells
    finish(cell)
    grid, table = tmp_path / "grid.yaml", tmp_path / "table.csv"
    if is_in_table:
        study.write_csv(study.all_rows(micro_study, table), table)
    grid.write_text("config: demo\nranks: 4\ncells:\n  Baseline: {balance.mode: 'off'}\n")
    other = study.read_study(grid, tmp_path / ("elsewhere" if is_in_table else "runs"))
    with pytest.raises(ValueError, match=r"there with other settings(.|\n)*now  .*ranks: 4"):
        study.all_rows(other, table)
    assert list(study.all_rows(micro_study, table)) == [cell.key]


def test_a_run_that_fails_at_its_very_end_is_not_finished(
    micro_study: study.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = micro_study.cells

    @contextmanager
    def started(command, log_file, environment):
        log_file.write_text("")
        (cell.folder / "summary.json").write_text(json.dumps({"test_accuracy": 0.5, "versions": {}}))
        yield SimpleNamespace(wait=lambda: 1)

    monkeypatch.setattr(jobs, "started", started)
    assert "failed with code 1" in str(train(micro_study, cell))
    assert cell.row() is None


def test_a_damaged_table_and_a_summary_of_something_else_are_named(tmp_path: Path, micro_study: study.Study) -> None:
    table, (cell,) = tmp_path / "table.csv", micro_study.cells
    for text in ("cell,seed,test_accuracy\nA,0\n", "cell,seed,test_accuracy\nA,0,1,2\n", "a\n"):
        table.write_text(text)
        with pytest.raises(ValueError, match=f"^{table}"):
            study.all_rows(micro_study, table)
        assert table.read_text() == text
    table.unlink()
    finish(cell)
    file = cell.folder / "summary.json"
    for text in ("[]", '{"versions": 3}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"^{file}: not of a run: delete that folder"):
            study.all_rows(micro_study, table)


def test_a_table_keeps_the_rows_of_other_grids(tmp_path: Path, micro_study: study.Study) -> None:
    table, other = tmp_path / "table.csv", tmp_path / "other.yaml"
    other.write_text("config: demo\nseeds: [0, 1]\ncells:\n  MIG: {balance.mode: mig}\n")
    other_study = study.read_study(other, tmp_path / "runs")
    for cell in (*other_study.cells, *micro_study.cells):
        finish(cell)
    study.write_csv(study.all_rows(other_study, table), table)
    study.write_csv(study.all_rows(micro_study, table), table)
    assert written(table) == [("Baseline", "0"), ("MIG", "0"), ("MIG", "1")]
