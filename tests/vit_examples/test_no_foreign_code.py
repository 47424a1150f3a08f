"""What a user is given, a YAML file or a data set, runs no code; for checkpoints see test_vit_checkpoint."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.faults import Evil

pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet
from helpers.runs import write_parquet

from scripts.study.grid import read_study
from vit_examples.config import DataConfig, ModelConfig
from vit_examples.config_file import load_config
from vit_examples.data import load_splits
from zeroresize import BalanceConfig

READERS: dict[str, Callable[[Path], Any]] = {
    "run": lambda path: load_config(str(path), []),
    "grid": lambda path: read_study(path, path.parent / "runs"),
    "balance": BalanceConfig.from_yaml,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("tag", ["object/apply:os.system", "object/new:os.system", "object/apply:subprocess.getoutput"])
def test_a_yaml_file_runs_no_code(tmp_path: Path, reader: str, tag: str) -> None:
    marker, path = tmp_path / "marker", tmp_path / "file.yaml"
    path.write_text(f"config: demo\ncells: {{}}\nbalance: !!python/{tag} ['touch {marker}']\n")
    with pytest.raises(ValueError, match=f"^{path}: "):
        READERS[reader](path)
    assert not marker.exists()


def test_a_parquet_file_runs_no_code(tmp_path: Path) -> None:
    """Arrow once unpickled what a file told of its columns' types."""
    for name in ("train", "test"):
        write_parquet(tmp_path / f"{name}.parquet", 4)
        table = pyarrow.parquet.read_table(tmp_path / f"{name}.parquet")
        metadata = {
            b"ARROW:extension:name": b"arrow.py_extension_type",
            b"ARROW:extension:metadata": pickle.dumps(Evil(tmp_path / "marker")),
        }
        fields = [table.schema.field("img"), table.schema.field("label").with_metadata(metadata)]
        pyarrow.parquet.write_table(table.cast(pyarrow.schema(fields)), tmp_path / f"{name}.parquet")
    train, _ = load_splits(DataConfig(source=str(tmp_path), train_size=4, test_size=4), ModelConfig(num_labels=10))
    assert len(train) == 4
    assert not (tmp_path / "marker").exists()
