"""scripts/study.py: the shipped grids, repeated cells, its table, and what is shown of a cell that failed."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.runs import written
from rich.console import Console
from rich.table import Table

pytest.importorskip("yaml")

from scripts.study import __main__ as study
from scripts.study.plot import place_of, read_points
from vit_examples.config_file import load_config
from vit_examples.harness.run_folder import run_lock

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
        yield SimpleNamespace(wait=lambda: code)

    monkeypatch.setattr(study, "started", started)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.stem)
def test_shipped_grids_are_sound_and_only_long_runs_write_checkpoints(grid: Path, tmp_path: Path) -> None:
    read = study.read_study(grid, tmp_path)
    assert len({cell.folder for cell in read.cells}) == len(read.cells)
    for cell in read.cells:
        assert (load_config(read.config, cell.overrides).output.save_every > 0) == (cell.epochs > 20)


@pytest.mark.parametrize("grid", PUBLISHED, ids=lambda grid: grid.stem)
def test_published_rows_of_a_shipped_grid_count_as_finished(grid: Path, tmp_path: Path) -> None:
    """Their settings are told in the very same words, so nothing of them runs again."""
    assert study.known_rows(study.read_study(grid, tmp_path), RESULTS / f"{grid.stem}.csv")


def ranks_of(grid: Path, **given: Any) -> dict[str, int]:
    return {cell.name: cell.ranks for cell in study.read_study(grid, grid.parent / "runs", **given).cells}


def test_a_cell_may_have_a_number_of_ranks_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, trained = tmp_path / "grid.yaml", []
    grid.write_text("config: demo\nranks: 2\ncells:\n  of 2: {}\n  of 4: {ranks: 4, balance.mode: mig}\n")
    assert ranks_of(grid) == {"of 2": 2, "of 4": 4}
    assert ranks_of(grid, ranks=3) == {"of 2": 3, "of 4": 3}
    read = study.read_study(grid, tmp_path / "runs")
    assert [cell.settings for cell in read.cells] == [
        "{config: demo, ranks: 2}",
        "{balance.mode: mig, config: demo, ranks: 4}",
    ]
    stub_training(monkeypatch, 0)
    monkeypatch.setattr(study, "train_command", lambda config, overrides, ranks: trained.append((ranks, overrides)))
    for cell in read.cells:
        study.run_cell(read, cell)
    assert [ranks for ranks, _ in trained] == [2, 4]
    assert not [override for _, overrides in trained for override in overrides if override.startswith("ranks")]


def test_a_base_whose_section_is_empty_is_as_one_without(tmp_path: Path) -> None:
    grid, base = tmp_path / "grid.yaml", tmp_path / "base.yaml"
    grid.write_text(f"config: {base}\nshared: {{balance.ratio: 0.5}}\ncells:\n  Rd: {{balance.mode: zero-rd}}\n")
    base.write_text("balance:\n")
    (cell,) = study.read_study(grid, tmp_path / "runs").cells
    assert "balance.ratio=0.5" in cell.overrides


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected a mapping of sections, found list"),
        ("", "expected a mapping of sections, found nothing"),
        ("balance: [1]", "expected a mapping of balance keys, found list"),
        ("balance: 5", "expected a mapping of balance keys, found int"),
    ],
)
def test_a_base_that_is_no_configuration_is_named(tmp_path: Path, text: str, message: str) -> None:
    grid, base = tmp_path / "grid.yaml", tmp_path / "base.yaml"
    grid.write_text(f"config: {base}\ncells:\n  Rd: {{balance.mode: zero-rd}}\n")
    base.write_text(text)
    with pytest.raises(ValueError, match=f"base.yaml: {message}"):
        study.read_study(grid, tmp_path / "runs")


@pytest.mark.parametrize("ranks", ["0", "four", "true", "2.0", "null"])
@pytest.mark.parametrize("place", ["cell", "grid"])
def test_ranks_that_are_no_number_of_ranks_are_refused(tmp_path: Path, place: str, ranks: str) -> None:
    grid = tmp_path / "grid.yaml"
    lines = {"cell": "", "grid": "", place: f"ranks: {ranks}"}
    grid.write_text(f"config: demo\n{lines['grid']}\ncells:\n  Rd: {{{lines['cell']}}}\n")
    with pytest.raises(ValueError, match=f"^{grid}, cell 'Rd': ranks=.* is not allowed: a whole number of at least 1"):
        study.read_study(grid, tmp_path / "runs")


def test_ranks_of_a_cell_that_cannot_share_its_model_are_refused(tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text("config: demo\ncells:\n  Rd: {ranks: 5}\n")
    with pytest.raises(ValueError, match=r"cell 'Rd': model.num_heads=12 is not divisible by the 5"):
        study.read_study(grid, tmp_path / "runs")


def test_table_1_draws_a_line_for_each_way_of_migrating_and_number_of_owners(tmp_path: Path) -> None:
    cells = study.read_study(GRIDS[0].with_name("table1.yaml"), tmp_path).cells
    places: dict[str, list[float | None]] = {}
    for cell in cells:
        line, x = place_of(cell.name, "γ")
        places.setdefault(line, []).append(x)
        assert line.endswith(f" of {cell.ranks}")
        owners = load_config("cifar_small", cell.overrides).balance.ranks
        assert owners == "stragglers" or f" ν={len(owners)} of " in line
    ways = ("broadcast-reduce", "scatter-gather")
    assert places == {"unmigrated of 2": [None], "unmigrated of 4": [None]} | {
        f"{way} ν={owners}": [0.25, 0.5, 0.75, 1.0] for way in ways for owners in ("1 of 2", "1 of 4", "2 of 4")
    }


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


def checkpoint(cell: study.Cell, base: str, epochs: int = 1) -> Path:
    """What a run that was cut off after so many epochs left."""
    folder = cell.checkpoint_folder / f"epoch-{epochs:04d}"
    folder.mkdir(parents=True)
    cell.settings_file.write_text(cell.settings)
    cell.base_file.write_text(base)
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
        assert cell.checkpoint_folder.exists() == goes_on
        yield SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(study, "started", started)
    grid.write_text("config: demo\nshared: {training.epochs: 2}\ncells:\n  Baseline: {}\n")
    read = study.read_study(grid, tmp_path / "runs")
    (cell,) = read.cells
    checkpoint(cell, read.base, epochs)
    assert study.run_study(read, tmp_path / "table.csv", Console(quiet=True)) == []
    assert ("--resume" in commands[0]) == goes_on
    assert not cell.checkpoint_folder.exists()


def test_checkpoints_of_other_settings_are_an_error_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody tries one epoch of a grid that was stopped late in 200."""
    grid, table = tmp_path / "grid.yaml", tmp_path / "table.csv"
    grid.write_text(
        "config: demo\nshared: {training.epochs: 200}\ncells:\n  Fresh: {}\n  Rd: {}\n  MIG: {}\n  Off: {}\n"
    )
    stopped = study.read_study(grid, tmp_path / "runs")
    fresh, *others = stopped.cells
    kept = [checkpoint(cell, stopped.base, 150) for cell in others]
    monkeypatch.setattr(study, "run_cell", lambda *_: pytest.fail("a cell ran"))
    changed = study.read_study(grid, tmp_path / "runs", changes=["training.epochs=1"])
    done = {"seed": 0, "test_accuracy": 0.5, "base": changed.base}  # elsewhere: it does not run here
    rows = {cell.key: {**done, "cell": cell.name, "settings": cell.settings} for cell in changed.cells[3:]}
    study.write_csv(rows, table)
    with pytest.raises(ValueError) as refused:
        study.run_study(changed, table, Console(quiet=True))
    assert str(refused.value).splitlines() == [
        "these folders hold checkpoints of other settings, which would be deleted:",
        *(f"  {cell.folder}" for cell in others[:2]),
        "the first are of other settings:",
        "  then {config: demo, ranks: 2, training.epochs: 200}",
        "  now  {config: demo, ranks: 2, training.epochs: 1}",
        "give another --output, or delete these folders",
    ]
    assert all(folder.is_dir() for folder in kept) and not fresh.folder.exists()
    elsewhere = study.read_study(grid, tmp_path / "elsewhere", changes=["training.epochs=1"])
    study.require_checkpoints_of_cells(elsewhere, {})
    study.require_checkpoints_of_cells(stopped, {})


@pytest.mark.parametrize("is_told", [True, False], ids=["other", "not told"])
def test_a_checkpoint_of_another_base_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    monkeypatch.setattr(study, "run_cell", lambda *_: pytest.fail("a cell ran"))
    before = base_of("training: {epochs: 2}\n", tmp_path)
    (cell,) = before.cells
    kept = checkpoint(cell, before.base)
    study.require_checkpoints_of_cells(before, {})
    after = base_of("training: {epochs: 3}\n", tmp_path) if is_told else before
    if not is_told:
        cell.base_file.unlink()
    then = "{training.epochs: 2}" if is_told else "not told"
    with pytest.raises(
        ValueError, match=rf"{cell.folder}\nthe first .* settings in .*base_config.yaml:\n  then {then}\n"
    ):
        study.run_study(after, tmp_path / "table.csv", Console(quiet=True))
    assert kept.is_dir()


def test_checkpoints_that_a_killed_study_left_of_finished_runs_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text("config: demo\nshared: {training.epochs: 2}\ncells:\n  done: {}\n  cut off: {}\n")
    both = study.read_study(grid, tmp_path / "runs")
    done, cut_off = both.cells
    finish(done)
    for cell in both.cells:
        checkpoint(cell, both.base)

    def run(of: study.Study, cell: study.Cell) -> None:
        assert cell == cut_off and cell.can_go_on(of.base)
        assert not done.checkpoint_folder.exists()

    monkeypatch.setattr(study, "run_cell", run)
    assert study.run_study(both, tmp_path / "table.csv", Console(quiet=True)) == []
    assert cut_off.checkpoint is not None and done.row() is not None


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
    checkpoint(cell, micro_study.base)
    log = cell.folder / "train.log"
    before = "error (rank 0): von gestern, für immer"  # bytes are more than letters, and it was killed within a line
    log.write_text(before, encoding="utf-8")
    stub_training(monkeypatch, 2, "error (rank 0): of today\n")
    with pytest.raises(RuntimeError, match=r"train\.log:\nerror \(rank 0\): of today$"):
        study.run_cell(micro_study, cell)
    assert log.read_text(encoding="utf-8") == before + "error (rank 0): of today\n"


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_run_that_fails_as_it_goes_on_names_the_folder_to_delete(
    micro_study: study.Study, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    (cell,) = micro_study.cells
    if goes_on:
        checkpoint(cell, micro_study.base)
    stub_training(monkeypatch, 1, "KeyError: of another layout\n")
    with pytest.raises(RuntimeError, match="failed with code 1") as failed:
        study.run_cell(micro_study, cell)
    hint = f"(if its checkpoint no longer loads, delete {cell.folder}); from"
    assert (hint in str(failed.value)) == goes_on


@pytest.mark.parametrize("key", ["training.seed", "balance.seed", "output.folder"])
def test_what_the_study_sets_cannot_be_set(tmp_path: Path, key: str) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text("config: demo\ncells:\n  Baseline: {}\n")
    with pytest.raises(ValueError, match=f"cell 'Baseline': \\['{key}'\\] are set by the study itself"):
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


def test_two_studies_never_write_the_same_whatever_their_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by whatever way they come to it."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "real"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with study.only_writer(tmp_path / "real/table.csv"):
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr(tempfile, "tempdir", None)
        same = tmp_path / "link/table.csv"
        with pytest.raises(ValueError, match=f"^{same}: another study is at it"), study.only_writer(same):
            pass


def test_links_in_the_place_of_a_studys_own_files_are_not_followed(tmp_path: Path, micro_study: study.Study) -> None:
    finish(micro_study.cells[0])
    table, precious = tmp_path / "table.csv", tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / ".table.csv.tmp").symlink_to(precious)
    assert study.run_study(micro_study, table, Console(quiet=True)) == []
    assert written(table) == [("Baseline", "0")] and not table.is_symlink()
    (tmp_path / ".table.csv.lock").unlink()
    (tmp_path / ".table.csv.lock").symlink_to(precious)
    with pytest.raises(ValueError, match=r"\.table\.csv\.lock: cannot be locked: "):
        study.run_study(micro_study, table, Console(quiet=True))
    assert precious.read_text() == "precious"


def test_a_table_where_there_can_be_none_is_told_before_anything_runs(
    tmp_path: Path, micro_study: study.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "run_cell", lambda *_: pytest.fail("a cell ran"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"{tmp_path}/file/table.csv: cannot be written: "):
        study.run_study(micro_study, tmp_path / "file" / "table.csv", Console(quiet=True))
    with pytest.raises(ValueError, match=f"{tmp_path}: a folder, not a table"):
        study.run_study(micro_study, tmp_path, Console(quiet=True))


NO_NAMES = ["..", ".", "", "' '", "/etc", "../up", "a/../../up", "a/..", "5", "0.5", "null", "true", "a" * 300]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_cell_whose_name_could_lead_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(f"config: demo\ncells:\n  {name if name and name != '.' else repr(name)}: {{}}\n")
    with pytest.raises(ValueError, match=f"^{grid}: "):
        study.read_study(grid, tmp_path / "runs")


def test_a_folder_in_which_a_run_is_writing_is_not_cleared(
    tmp_path: Path, micro_study: study.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = micro_study.cells
    cell.folder.mkdir(parents=True)
    (cell.folder / "metrics.jsonl").touch()
    stub_training(monkeypatch, 0)
    with run_lock(cell.folder):
        (failure,) = study.run_study(micro_study, tmp_path / "table.csv", Console(quiet=True))
    assert f"output.folder={cell.folder}: another run is writing there" in failure
    assert (cell.folder / "metrics.jsonl").exists()


DAMAGED_TABLES = [
    (
        "cell,step_ms\nBaseline,1\n",
        r"not a table of scripts.study: the columns \['seed', 'test_accuracy'\] are missing",
    ),
    ("", "not a table of scripts.study: the columns .* are missing"),
    ("cell,seed,test_accuracy\nBaseline,0\n", "line 2: another number of values than columns"),
    ("cell,seed,test_accuracy\nBaseline,0,0.5,7\n", "line 2: another number of values than columns"),
    ("cell,seed,test_accuracy\nA,0,0.5\nBaseline,0,0.5x\n", "line 3: test_accuracy='0.5x' is no number"),
    ("cell,seed,test_accuracy,step_ms\nBaseline,0,0.5,nan\n", "line 2: step_ms='nan' is no number"),
    ('cell,seed,test_accuracy\n"Baseline,0,0.5\n', "not a table of scripts.study: unexpected end of data"),
    ("cell,seed,test_accuracy\nBaseline,\xff,0.5\n", "not a table of scripts.study: .*codec can't decode"),
]


@pytest.mark.parametrize(("text", "message"), DAMAGED_TABLES)
def test_a_damaged_table_is_named_with_its_line(
    tmp_path: Path, micro_study: study.Study, text: str, message: str
) -> None:
    table = tmp_path / "table.csv"
    table.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"^{table}.*{message}"):
        study.known_rows(micro_study, table)
    with pytest.raises(ValueError, match=f"^{table}"):
        read_points(table, "χ")
    assert table.read_bytes() == text.encode("latin-1")


@pytest.mark.parametrize("summary", ["[]", "5", "{}", '{"versions": 3}'])
def test_a_summary_of_something_else_is_named(tmp_path: Path, micro_study: study.Study, summary: str) -> None:
    (cell,) = micro_study.cells
    finish(cell)
    cell.summary_file.write_text(summary)
    with pytest.raises(ValueError, match=f"^{cell.summary_file}: not the summary of a run: delete {cell.folder} and"):
        study.known_rows(micro_study, tmp_path / "table.csv")


def test_settings_that_are_no_text_are_named(tmp_path: Path, micro_study: study.Study) -> None:
    (cell,) = micro_study.cells
    finish(cell)
    cell.settings_file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=f"^{cell.settings_file}: damaged: delete {cell.folder} and"):
        study.known_rows(micro_study, tmp_path / "table.csv")


def test_a_run_without_an_accuracy_is_tabulated(tmp_path: Path, micro_study: study.Study) -> None:
    """NaN is null in its summary, and nothing in the table."""
    (cell,) = micro_study.cells
    finish(cell, test_accuracy=None, mean_step_ms=110.0)
    table = tmp_path / "table.csv"
    study.write_csv(study.all_rows(micro_study, table), table)
    for rows in (study.known_rows(micro_study, tmp_path / "none.csv"), study.known_rows(micro_study, table)):
        assert [str(cell) for cell in study.results_table(micro_study, rows).columns[3].cells] == ["-"]


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
