"""Data that somebody else made: damaged, made to harm, not there, or less than asked for."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("datasets")

import pyarrow
import pyarrow.parquet
from helpers.runs import write_parquet
from PIL import Image

from vit_examples import hub
from vit_examples.config import DataConfig, ModelConfig
from vit_examples.data import load_splits, local_path
from vit_examples.picture_cells import MOST_PIXELS

ROOT = Path(__file__).resolve().parents[2]


def png(side: int = 32) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), 7, dtype=np.uint8)).save(stream, format="PNG")
    return stream.getvalue()


def png_bomb(side: int) -> bytes:
    """A small file that claims to be ``side`` pixels wide and high."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, content) for kind, content in chunks)


def refusal(folder: Path, pictures: Any, labels: Any) -> str:
    """What is said of training rows with those cells."""
    pyarrow.parquet.write_table(pyarrow.table({"img": pictures, "label": labels}), folder / "train.parquet")
    write_parquet(folder / "test.parquet", 3)
    with pytest.raises(ValueError, match="train") as refused:
        load_splits(DataConfig(source=str(folder)), ModelConfig())
    return str(refused.value)


def cell(content: bytes | None = None, path: str | None = None) -> dict[str, Any]:
    return {"bytes": content, "path": path}


@pytest.mark.parametrize(
    ("labels", "label"),
    [
        ([1, None], "None"),
        ([1.0, 2.7], "2.7"),
        ([1.0, float("nan")], "nan"),
        ([1, -1], "-1"),
        ([1, 2**40], str(2**40)),
    ],
)
def test_labels_that_are_no_whole_numbers_are_named(tmp_path: Path, labels: list[Any], label: str) -> None:
    said = refusal(tmp_path, [cell(png())] * 2, labels)
    assert f"the label is {label}, expected a whole number from 0 on" in said
    assert f"{tmp_path}/train.parquet, row {0 if labels[0] != 1 else 1}" in said


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("string", ["1", "2"]),
        ("list<item: int64>", [[1], [2]]),
        ("timestamp[us]", [2**62, 1]),
        ("date32[day]", [2**30, 1]),
        ("duration[us]", [2**62, 1]),
    ],
)
def test_labels_of_a_type_that_has_no_whole_numbers_are_refused(tmp_path: Path, kind: str, labels: list[Any]) -> None:
    temporal = {
        "timestamp[us]": pyarrow.timestamp("us"),
        "date32[day]": pyarrow.date32(),
        "duration[us]": pyarrow.duration("us"),
    }
    column = pyarrow.array(labels, pyarrow.int32() if kind == "date32[day]" else None)
    said = refusal(tmp_path, [cell(png())] * 2, column.cast(temporal[kind]) if kind in temporal else column)
    assert said.startswith(f"{tmp_path}/train.parquet: column 'label' is of type {kind.split('<')[0]}")
    assert said.endswith(", expected whole numbers from 0 on")


def test_labels_may_be_numbers_in_a_dictionary(tmp_path: Path) -> None:
    labels = pyarrow.array([4, 3]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"img": [png()] * 2, "label": labels}), tmp_path / "train.parquet")
    write_parquet(tmp_path / "test.parquet", 2)
    assert load_splits(DataConfig(source=str(tmp_path)), ModelConfig())[0].labels.tolist() == [4, 3]


def test_pictures_of_a_type_that_python_lacks_are_refused(tmp_path: Path) -> None:
    times = pyarrow.array([2**62, 1]).cast(pyarrow.timestamp("us"))
    twice = pyarrow.StructArray.from_arrays([pyarrow.array([b"1", b"2"])] * 2, names=["bytes", "bytes"])
    for pictures in (times, twice):
        said = refusal(tmp_path, pictures, [1, 2])
        assert said.startswith(f"{tmp_path}/train.parquet: column 'img' is of type {str(pictures.type)[:9]}")


@pytest.mark.parametrize("name", ["img", "label"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, name: str) -> None:
    columns = {"img": pyarrow.array([png()] * 2), "label": pyarrow.array([1, 2])}
    table = pyarrow.table([*columns.values(), columns[name]], names=[*columns, name])
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    write_parquet(tmp_path / "test.parquet", 2)
    with pytest.raises(ValueError, match=f"^{tmp_path}/train.parquet: 2 columns are named '{name}', expected one$"):
        load_splits(DataConfig(source=str(tmp_path)), ModelConfig())


def test_a_picture_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_bytes(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "a.png").write_bytes(png())
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    said = refusal(tmp_path, [cell(path="a.png")], [1])
    assert said == f"{tmp_path}/train.parquet, row 0: {tmp_path}/a.png cannot be read: Permission denied"


def test_whole_numbers_may_be_written_as_floats(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"img": [png()] * 2, "label": [1.0, 3.0]}), tmp_path / "train.parquet")
    write_parquet(tmp_path / "test.parquet", 3)
    assert load_splits(DataConfig(source=str(tmp_path)), ModelConfig())[0].labels.tolist() == [1, 3]


@pytest.mark.parametrize("side", [9_000, 40_000, 2**31 - 1])
def test_a_small_file_of_very_many_pixels_is_not_decoded(tmp_path: Path, side: int) -> None:
    bomb = png_bomb(side)
    assert len(bomb) < 2_000 and side**2 > MOST_PIXELS
    said = refusal(tmp_path, [cell(bomb)], [0])
    assert "row 0" in said and "pixels" in said


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\nshowpage\n"


@pytest.mark.parametrize(
    "content",
    [
        png()[:60],
        b"",
        POSTSCRIPT,
        png().replace(b"IDAT", b"IDAX"),
    ],
    ids=["truncated", "empty", "PostScript", "chunk"],
)
def test_what_is_no_whole_picture_is_named(tmp_path: Path, content: bytes) -> None:
    assert "train.parquet, row 1: the picture is damaged" in refusal(tmp_path, [cell(png()), cell(content)], [0, 1])


@pytest.mark.parametrize("pictures", [[5], ["x"], [[1, 2]], [cell()], [{"png": b""}]])
def test_cells_that_hold_no_picture_are_named(tmp_path: Path, pictures: list[Any]) -> None:
    assert "row 0: no picture in it, found" in refusal(tmp_path, pictures, [0])


def test_pictures_may_be_files_beside_the_parquet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.png").write_bytes(png())
    monkeypatch.chdir(ROOT)
    table = pyarrow.table({"img": [cell(path="files/a.png")], "label": [4]})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    write_parquet(tmp_path / "test.parquet", 3)
    train, _ = load_splits(DataConfig(source=str(tmp_path)), ModelConfig())
    assert train.images.unique().tolist() == [7]


def test_paths_that_lead_out_of_the_data_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    outside = tmp_path / "outside.png"
    outside.write_bytes(png())
    (folder / "inside.png").write_bytes(png())
    (folder / "link.png").symlink_to(outside)
    os.mkfifo(folder / "pipe.png")
    for path in (str(outside), "../outside.png", "sub/../inside.png", str(folder / "inside.png"), "link.png"):
        assert "leads out of" in refusal(folder, [cell(path=path)], [0])
    for path in ("none.png", "sub", "pipe.png", "x" * 5000, "a\0b"):
        assert "row 0: no file" in refusal(folder, [cell(path=path)], [0])


@pytest.mark.parametrize("keep", [3, 200, -100])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    write_parquet(tmp_path / "train.parquet", 10)
    write_parquet(tmp_path / "test.parquet", 10)
    whole = (tmp_path / "test.parquet").read_bytes()
    (tmp_path / "test.parquet").write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=r"test\.parquet: damaged, or no parquet file"):
        load_splits(DataConfig(source=str(tmp_path)), ModelConfig())


def test_a_file_with_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", 10)
    write_parquet(tmp_path / "test.parquet", 10)
    whole = bytearray((tmp_path / "train.parquet").read_bytes())
    for start in range(4, len(whole) - 1500, 50):
        whole[start : start + 20] = os.urandom(20)
    (tmp_path / "train.parquet").write_bytes(bytes(whole))
    with pytest.raises(ValueError, match=r"train\.parquet"):
        load_splits(DataConfig(source=str(tmp_path)), ModelConfig())


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "test"])
def test_more_pictures_than_there_are_is_an_error(tmp_path: Path, kind: str) -> None:
    write_parquet(tmp_path / "train-0.parquet", 5)
    write_parquet(tmp_path / "train-1.parquet", 5)
    write_parquet(tmp_path / "test.parquet", 10)
    for source, available in ((str(tmp_path), 10), ("mnist5k", {"train": 4000, "test": 1000}[kind])):
        message = rf"data\.{kind}_size={available + 1} is more than the {available} {kind} pictures of .*{source}: "
        with pytest.raises(ValueError, match=message + f"choose at most {available}, or null for all"):
            load_splits(DataConfig(source=source, **{f"{kind}_size": available + 1}), ModelConfig())
        assert load_splits(DataConfig(source=source, **{f"{kind}_size": available}), ModelConfig())


def test_a_hub_name_is_told_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "a_file").touch()
    paths = ["data/cifar", "data", "./cifar", "/cifar", "~/cifar", "a/b/cifar", "cifar/", "cifar.parquet", "a_file"]
    assert all(local_path(path) is not None for path in [*paths, "a\\cifar"])
    assert [name for name in ("cifar10", "uoft-cs/cifar10") if local_path(name) is not None] == []


@pytest.mark.parametrize(
    "source", ["data/cifar", "a/b/cifar", "~/nowhere", "cifar.parquet", "x" * 5000, "~nobody-here/x"]
)
def test_a_path_where_nothing_is_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(hub, "load", lambda name: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match=r"data\.source="):
        load_splits(DataConfig(source=source), ModelConfig())


LOAD = """
import sys
from vit_examples.config import DataConfig, ModelConfig
from vit_examples.data import load_splits
try:
    load_splits(DataConfig(source=sys.argv[1]), ModelConfig())
except ValueError as error:
    print(error)
"""


def loading_says(source: str, folder: Path, **variables: str) -> str:
    """What a process of its own says in ``folder``: going offline lasts as long as a process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "cache"), **variables}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, source], cwd=folder, env=environment, capture_output=True, text=True, timeout=90
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_where_the_hub_does_not_answer_both_readings_are_said_at_once(tmp_path: Path) -> None:
    source = "data/cifar"
    said = loading_says(source, tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert "Retrying" not in said
    assert f"no folder '{tmp_path}/{source}'" in said
    assert (
        "no data set of that name can be loaded from the Hugging Face hub (http://127.0.0.1:9 does not answer)" in said
    )


@pytest.mark.slow
def test_offline_is_respected(tmp_path: Path) -> None:
    assert "(offline: HF_HUB_OFFLINE" in loading_says("some/name", tmp_path, HF_HUB_OFFLINE="1")


def hub_data(monkeypatch: pytest.MonkeyPatch, images: list[Any], labels: list[Any], kind: Any = None) -> None:
    """Let any name be that of a data set with these rows in both splits."""
    import datasets

    rows = datasets.Dataset.from_dict({"image": images, "label": labels})
    rows = rows.cast_column("image", kind or datasets.Image())
    monkeypatch.setattr(hub, "load", lambda name: {"train": rows, "test": rows})


def test_a_data_set_of_the_hub_is_checked_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    downloads = tmp_path / "cache"
    downloads.mkdir()
    (tmp_path / "outside.png").write_bytes(png())
    (downloads / "inside.png").write_bytes(png())
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", downloads)
    source = DataConfig(source="some/name")

    hub_data(monkeypatch, [cell(png()), cell(path=str(downloads / "inside.png"))], [3, 4])
    assert load_splits(source, ModelConfig())[0].labels.tolist() == [3, 4]
    with pytest.raises(ValueError, match=r"data\.train_size=3 is more than the 2 train pictures of .*some/name"):
        load_splits(DataConfig(source="some/name", train_size=3), ModelConfig())
    for images, labels, message in (
        ([cell(path=str(tmp_path / "outside.png"))], [0], "row 0: the picture's path .* leads out of"),
        ([cell(path=str(downloads / ".." / "outside.png"))], [0], "row 0: the picture's path .* leads out of"),
        ([cell(png()), cell(png_bomb(40_000))], [0, 0], "split train, row 1: .*pixels"),
        ([cell(png())], [None], "row 0: the label is None"),
    ):
        hub_data(monkeypatch, images, labels)
        with pytest.raises(ValueError, match=message):
            load_splits(source, ModelConfig())
    hub_data(monkeypatch, [5], [0], datasets.Value("int64"))
    with pytest.raises(ValueError, match="column 'image' does not hold pictures"):
        load_splits(source, ModelConfig())


def test_a_server_that_takes_no_connection_does_not_answer() -> None:
    assert not hub.answers("http://127.0.0.1:9")


class RunsCode:
    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self._made),)


@pytest.mark.parametrize("name", ["pandas", "folder_based_builder", "csv"])
def test_a_file_format_is_no_data_set_whatever_datasets_tells_of_its_own(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.delattr(datasets.packaged_modules, "_PACKAGED_DATASETS_MODULES")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("it is loaded"))
    monkeypatch.setattr(hub, "answers", lambda _: True)
    with pytest.raises(ValueError, match=f"{name!r} is a file format of `datasets`"):
        hub.load(name)


@pytest.mark.parametrize("source", ["pandas", "./data", "data/script.py", "data", "script.py"])
def test_nothing_that_lies_about_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """`datasets` unpickles the files of the current folder where it is asked for "pandas"; it once ran scripts."""
    made, folder = tmp_path / "made", tmp_path / "here"
    (folder / "data").mkdir(parents=True)
    for file in ("script.py", "data/data.py", "data/script.py", "data/__init__.py") if source != "pandas" else ():
        (folder / file).write_text(f"import os; os.mkdir({str(made)!r})")
    for file in ("train.pkl", "data/train.pkl", "data/train.parquet"):
        (folder / file).write_bytes(pickle.dumps(RunsCode(made)))
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match="data"):
        load_splits(DataConfig(source=source), ModelConfig())
    assert not made.exists()
