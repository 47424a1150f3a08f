"""scripts/study.py: the shipped grids, repeated cells, its table, and what is shown of a cell that failed."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from table_rows import written

pytest.importorskip("yaml")

from scripts import study
from vit_examples.config_file import load_config

GRIDS = sorted(Path(study.__file__).with_name("grids").glob("*.yaml"))


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
        yield SimpleNamespace(wait=lambda: code)

    monkeypatch.setattr(study, "started", started)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.stem)
def test_shipped_grids_are_sound_and_only_long_runs_write_checkpoints(grid: Path, tmp_path: Path) -> None:
    read = study.read_study(grid, tmp_path)
    assert len({cell.folder for cell in read.cells}) == len(read.cells)
    for cell in read.cells:
        assert (load_config(read.config, cell.overrides).output.save_every > 0) == (cell.epochs > 20)


def test_a_grid_takes_anothers_cells_and_nothing_else_of_it(tmp_path: Path) -> None:
    small, large = tmp_path / "small.yaml", tmp_path / "large.yaml"
    modes = "{Rd: {balance.mode: zero-rd}, MIG: {balance.mode: mig}}"
    small.write_text(f"config: demo\nranks: 2\nshared: {{training.epochs: 1}}\ncells: {modes}\n")
    large.write_text("config: cifar_small\nranks: 4\nshared: {training.epochs: 7}\ncells: small.yaml\n")
    cells = study.read_study(large, tmp_path / "runs").cells
    settings = {cell.name: load_config("cifar_small", cell.overrides) for cell in cells}
    assert {name: one.balance.mode for name, one in settings.items()} == {"Rd": "zero-rd", "MIG": "mig"}
    assert all(one.training.epochs == 7 for one in settings.values())


@pytest.mark.parametrize("cells", ["[Rd]", "named.yaml", "3"])
def test_cells_that_are_neither_a_mapping_nor_a_grid_that_has_one_are_refused(tmp_path: Path, cells: str) -> None:
    grid, named = tmp_path / "grid.yaml", tmp_path / "named.yaml"
    named.write_text("config: demo\ncells: grid.yaml\n")
    grid.write_text(f"config: demo\ncells: {cells}\n")
    with pytest.raises(ValueError, match=r"grid\.yaml: 'cells' must be a mapping"):
        study.read_study(grid, tmp_path / "runs")


def test_a_cell_says_what_yaml_can_say(tmp_path: Path) -> None:
    """Also keys that are numbers."""
    grid = tmp_path / "grid.yaml"
    grid.write_text("config: demo\ncells:\n  slow: {straggler.kind: sleep, straggler.chi: {1: 4.0}}\n")
    (cell,) = study.read_study(grid, tmp_path / "runs").cells
    assert load_config("demo", cell.overrides).straggler.chi == {1: 4.0}


def test_cells_that_differ_in_any_letter_have_folders_of_their_own(tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text("config: demo\ncells:\n  Pri γ=1/2: {}\n  Pri δ γ=1/2: {}\n")
    folders = [cell.folder.parent.name for cell in study.read_study(grid, tmp_path / "runs").cells]
    assert folders == ["Pri_γ=1-2", "Pri_δ_γ=1-2"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "cells:\n  Pri 1/2: {}\n  Pri 1-2: {}\n",
            "cell 'Pri 1-2', seed 0, and cell 'Pri 1/2', seed 0, would both run",
        ),
        ("seeds: [3, 3]\ncells:\n  Pri: {}\n", "cell 'Pri', seed 3, and cell 'Pri', seed 3, would both run"),
    ],
)
def test_cells_that_would_delete_each_others_runs_are_refused(tmp_path: Path, text: str, named: str) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(f"config: demo\n{text}")
    with pytest.raises(ValueError, match=f"^{grid}: {named} in {tmp_path}/runs/grid/.*: call one of them differently"):
        study.read_study(grid, tmp_path / "runs")


def test_an_unfinished_run_is_cleared_before_the_cell_runs_again(
    micro_study: study.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = micro_study.cells
    cell.folder.mkdir(parents=True)
    (cell.folder / "metrics.jsonl").touch()
    stub_training(monkeypatch, 0)
    study.run_cell(micro_study, cell)
    assert {path.name for path in cell.folder.iterdir()} == {"settings.yaml", "base.yaml", "train.log"}


def checkpoint(cell: study.Cell, base: str, epochs: int) -> Path:
    """What a run that was cut off after so many epochs left."""
    folder = cell.checkpoint_folder / f"epoch-{epochs:04d}"
    folder.mkdir(parents=True)
    cell.settings_file.write_text(cell.settings)
    cell.base_file.write_text(base)
    return folder


@pytest.mark.parametrize(
    ("changed", "epochs", "goes_on"),
    [
        ("{balance.mode: 'off'}", 1, True),
        ("{balance.mode: zero-rd}", 1, False),
        ("{balance.mode: 'off'}", 2, False),  # it ended, and badly: nothing of it was timed if it went on
    ],
)
def test_a_run_that_was_cut_off_goes_on_from_its_checkpoint_unless_it_was_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, epochs: int, goes_on: bool
) -> None:
    grid, commands = tmp_path / "grid.yaml", []

    @contextmanager
    def started(command, log_file, environment):
        log_file.write_text("")
        commands.append(command)
        assert cell.checkpoint_folder.exists() == goes_on
        yield SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(study, "started", started)
    for cells in ("{balance.mode: 'off'}", changed):
        grid.write_text(f"config: demo\nshared: {{training.epochs: 2}}\ncells:\n  Baseline: {cells}\n")
        now = study.read_study(grid, tmp_path / "runs")
        (cell,) = now.cells
        if not cell.folder.exists():
            checkpoint(cell, now.base, epochs)
    study.run_cell(now, cell)
    assert ("--resume" in commands[0]) == goes_on
    assert not cell.checkpoint_folder.exists()


def test_a_run_of_another_base_does_not_go_on(tmp_path: Path) -> None:
    before = base_of("training: {epochs: 2}\n", tmp_path)
    checkpoint(before.cells[0], before.base, 1)
    assert before.cells[0].can_go_on(before.base)
    after = base_of("training: {epochs: 3}\n", tmp_path)
    assert not after.cells[0].can_go_on(after.base)


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


def test_a_run_that_goes_on_and_fails_shows_its_new_mistake_only(
    micro_study: study.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = micro_study.cells
    checkpoint(cell, micro_study.base, 1)
    log = cell.folder / "train.log"
    log.write_text("error (rank 0): of yesterday\n")
    stub_training(monkeypatch, 2, "error (rank 0): of today\n")
    with pytest.raises(RuntimeError, match=r"train\.log:\nerror \(rank 0\): of today$"):
        study.run_cell(micro_study, cell)
    assert log.read_text() == "error (rank 0): of yesterday\nerror (rank 0): of today\n"


@pytest.mark.parametrize("key", ["training.seed", "balance.seed", "output.folder"])
def test_what_the_study_sets_cannot_be_set(tmp_path: Path, key: str) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text("config: demo\ncells:\n  Baseline: {}\n")
    with pytest.raises(ValueError, match=f"cell 'Baseline': \\['{key}'\\] are the study's to set"):
        study.read_study(grid, tmp_path, changes=[f"{key}=5"])


LONG_LOG = [f"line {number}\n" for number in range(40)]


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (
            "hello\nerror (rank 1): a\nerror (rank 0): a\nerror (rank 0): b\nbye\n",
            "error (rank 1): a\nerror (rank 0): b",
        ),
        ("".join(LONG_LOG), "".join(LONG_LOG[10:]).rstrip()),
    ],
)
def test_a_failed_cell_shows_its_mistakes_or_else_the_end_of_its_log(
    micro_study: study.Study, monkeypatch: pytest.MonkeyPatch, log: str, shown: str
) -> None:
    stub_training(monkeypatch, 2, log)
    with pytest.raises(RuntimeError, match="cell 'Baseline', seed 0 failed with code 2") as failed:
        study.run_cell(micro_study, micro_study.cells[0])
    assert str(failed.value).endswith(f"train.log:\n{shown}")


def finish(cell: study.Cell, **numbers: Any) -> None:
    cell.folder.mkdir(parents=True)
    summary = {"test_accuracy": 0.5, "ranks": 2, "versions": {"torch": "2"}, **numbers}
    cell.summary_file.write_text(json.dumps(summary))
    cell.settings_file.write_text(cell.settings)


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ("config: demo\ncells:\n  Baseline: {balance.mode: zero-rd}\n", "balance.mode: zero-rd"),
        ("config: demo\nshared: {training.epochs: 9}\ncells:\n  Baseline: {balance.mode: 'off'}\n", "epochs: 9"),
        ("config: vit_tiny\ncells:\n  Baseline: {balance.mode: 'off'}\n", "config: vit_tiny"),
        ("config: demo\nranks: 4\ncells:\n  Baseline: {balance.mode: 'off'}\n", "ranks: 4"),
    ],
)
@pytest.mark.parametrize("is_in_table", [True, False], ids=["row", "folder"])
def test_what_is_finished_with_other_settings_is_no_result_of_this_study(
    tmp_path: Path, micro_study: study.Study, changed: str, shown: str, is_in_table: bool
) -> None:
    (cell,) = micro_study.cells
    finish(cell)
    grid, table = tmp_path / "grid.yaml", tmp_path / "table.csv"
    if is_in_table:
        study.write_csv(study.all_rows(micro_study, table), table)
    grid.write_text(changed)
    other = study.read_study(grid, tmp_path / ("elsewhere" if is_in_table else "runs"))
    with pytest.raises(ValueError, match=rf"finished with other settings(.|\n)*now  .*{shown}"):
        study.known_rows(other, table)
    assert list(study.known_rows(micro_study, table)) == [cell.key]


def test_a_summary_that_was_cut_off_is_of_no_finished_run(tmp_path: Path, micro_study: study.Study) -> None:
    (cell,) = micro_study.cells
    finish(cell)
    cell.summary_file.write_text(cell.summary_file.read_text()[:20])
    assert study.known_rows(micro_study, tmp_path / "table.csv") == {}


def test_a_run_that_fails_at_its_very_end_is_not_finished(
    micro_study: study.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = micro_study.cells

    @contextmanager
    def started(command, log_file, environment):
        log_file.write_text("")
        cell.summary_file.write_text(json.dumps({"test_accuracy": 0.5, "versions": {}}))
        yield SimpleNamespace(wait=lambda: 1)

    monkeypatch.setattr(study, "started", started)
    with pytest.raises(RuntimeError, match="failed with code 1"):
        study.run_cell(micro_study, cell)
    assert cell.row() is None


def base_of(text: str, folder: Path) -> study.Study:
    """A study of one cell, whose configuration is a file of that text."""
    (folder / "base_config.yaml").write_text(text)
    (folder / "grid.yaml").write_text(
        f"config: {folder}/base_config.yaml\ncells:\n  Baseline: {{balance.mode: 'off'}}\n"
    )
    return study.read_study(folder / "grid.yaml", folder / "runs")


@pytest.mark.parametrize("is_in_table", [True, False], ids=["row", "folder"])
def test_what_is_finished_with_another_base_is_no_result_of_this_study(tmp_path: Path, is_in_table: bool) -> None:
    before = base_of("training: {epochs: 2}\noutput: {folder: runs/a, save_every: 1}\n", tmp_path)
    (cell,) = before.cells
    finish(cell)
    cell.base_file.write_text(before.base)
    table = tmp_path / "table.csv"
    if is_in_table:
        study.write_csv(study.all_rows(before, table), table)
        shutil.rmtree(cell.folder)
    assert study.known_rows(before, table)[cell.key]["base"] == "{output.save_every: 1, training.epochs: 2}"
    same = base_of("# said otherwise\noutput: {save_every: 1}\ntraining:\n  epochs: 2\n", tmp_path)
    assert list(study.known_rows(same, table)) == [cell.key]
    other = base_of("training: {epochs: 3}\noutput: {save_every: 1}\n", tmp_path)
    with pytest.raises(ValueError, match=r"finished with other settings in .*base_config.yaml(.|\n)*now  .*epochs: 3"):
        study.known_rows(other, table)


def test_rows_of_older_tables_are_finished_and_stay_beside_newer_ones(tmp_path: Path) -> None:
    """They tell neither base, commit nor mean step time."""
    grid, table = tmp_path / "grid.yaml", tmp_path / "table.csv"
    grid.write_text("config: demo\nseeds: [0, 1]\ncells:\n  Baseline: {balance.mode: 'off'}\n")
    both = study.read_study(grid, tmp_path / "runs")
    old, new = both.cells
    row = {"cell": old.name, "seed": "0", "step_ms": "200.0", "test_accuracy": "0.5", "settings": old.settings}
    study.write_csv({old.key: row}, table)
    finish(new, step_ms=100.0, mean_step_ms=110.0, commit="abc1234-dirty")
    new.base_file.write_text(both.base)
    study.write_csv(study.all_rows(both, table), table)
    rows = study.known_rows(both, table)
    assert list(rows) == [old.key, new.key]
    assert (rows[old.key]["base"], rows[old.key]["commit"], rows[old.key]["mean_step_ms"]) == ("", "", "")
    assert (rows[new.key]["base"], rows[new.key]["commit"]) == (both.base, "abc1234-dirty")
    assert shown(study.results_table(both, rows))[:2] == ["median step, ms", "150 ± 71"]
    assert shown(study.results_table(both, {new.key: rows[new.key]}))[:2] == ["mean step, ms", "110"]


def shown(table: Table) -> list[str]:
    """The heading of the step time, and every cell of that column."""
    column = table.columns[2]
    return [str(column.header), *map(str, column.cells)]


@pytest.mark.parametrize("same", ["table", "runs"])
def test_two_studies_never_write_the_same(tmp_path: Path, micro_study: study.Study, same: str) -> None:
    finish(micro_study.cells[0])
    table = tmp_path / "table.csv"
    taken = table if same == "table" else tmp_path / "runs" / "grid"
    with study.only_writer(taken), pytest.raises(ValueError, match=rf"{taken}: another study is at it"):
        study.run_study(micro_study, table, Console(quiet=True))
    assert not table.exists()
    assert study.run_study(micro_study, table, Console(quiet=True)) == [] and table.exists()


def test_a_table_keeps_the_rows_of_other_grids(tmp_path: Path, micro_study: study.Study) -> None:
    table, other = tmp_path / "table.csv", tmp_path / "other.yaml"
    other.write_text("config: demo\nseeds: [0, 1]\ncells:\n  MIG: {balance.mode: mig}\n")
    other_study = study.read_study(other, tmp_path / "runs")
    for cell in (*other_study.cells, *micro_study.cells):
        finish(cell)
    study.write_csv(study.all_rows(other_study, table), table)
    study.write_csv(study.all_rows(micro_study, table), table)
    assert written(table) == [("Baseline", "0"), ("MIG", "0"), ("MIG", "1")]
    assert list(study.known_rows(micro_study, table)) == [("Baseline", "0")]


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, table = tmp_path / "grid.yaml", tmp_path / "table.csv"
    grid.write_text("config: demo\nseeds: [0, 1]\ncells:\n  Baseline: {balance.mode: 'off'}\n")
    both = study.read_study(grid, tmp_path / "runs")

    def run(of: study.Study, cell: study.Cell) -> None:
        if cell.seed == 0:
            raise RuntimeError("cell 'Baseline', seed 0 failed")
        finish(cell)

    monkeypatch.setattr(study, "run_cell", run)
    stream = io.StringIO()
    assert study.run_study(both, table, Console(file=stream)) == ["cell 'Baseline', seed 0 failed"]
    assert written(table) == [("Baseline", "1")]
    assert stream.getvalue().splitlines() == [
        "1/2 failed: Baseline, seed 0, 0:00:00; left ?",
        "2/2 finished: Baseline, seed 1, 0:00:00; left 0:00:00",
    ]
