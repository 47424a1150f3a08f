"""Pictures of training runs: where they come from, and that every rank sees the same batches."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet
from helpers.runs import write_parquet
from PIL import Image

from vit_examples.batches import augmented, normalise, test_batches, training_batches
from vit_examples.config import DataConfig, ModelConfig
from vit_examples.data import Split, load_splits

test_batches.__test__ = False  # a function under test, not a test


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_parquet(tmp_path / "train-00000-of-00001.parquet", 30)
    write_parquet(tmp_path / "test-00000-of-00001.parquet", 20)
    return tmp_path


@pytest.mark.slow
def test_mnist5k_is_shuffled_padded_and_split() -> None:
    train, test = load_splits(DataConfig(train_size=3000), ModelConfig())
    assert train.images.shape == (3000, 3, 32, 32)
    assert test.images.shape == (1000, 3, 32, 32)
    assert train.images.dtype == torch.uint8
    assert train.images[:, :, :2].max() == 0  # the border
    assert (train.images[:, 0] == train.images[:, 2]).all()
    assert test.labels.bincount(minlength=10).min() > 60  # sorted digits would leave classes out


def test_a_parquet_folder_gives_its_first_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_PICTURES", str(folder))
    train, test = load_splits(DataConfig(source="${SOME_PICTURES}", train_size=25), ModelConfig())
    assert (len(train), len(test)) == (25, 20)
    assert train.labels.tolist() == [n % 10 for n in range(25)]
    expected = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)[:25]
    assert torch.equal(train.images, torch.from_numpy(expected).permute(0, 3, 1, 2))


def refused(source: str | Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_splits(DataConfig(source=str(source)), ModelConfig())


def test_what_is_missing_or_damaged_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZERORESIZE_CIFAR10", raising=False)
    refused("${ZERORESIZE_CIFAR10}", "ZERORESIZE_CIFAR10 is not set; export ZERORESIZE_CIFAR10=")
    refused(folder / "nowhere", r"nowhere'.*no such folder")
    (folder / "empty").mkdir()
    refused(folder / "empty", r"no train\*.parquet in it; expected columns img or image, and label")
    damaged = folder / "test-00000-of-00001.parquet"
    table = pyarrow.parquet.read_table(damaged).slice(0, 1)
    damaged.write_bytes(damaged.read_bytes()[:2000])
    refused(folder, r"test-00000-of-00001\.parquet: damaged")
    for label in (-1, 2**31, 0.5, None, "3", True):
        pyarrow.parquet.write_table(pyarrow.table({"img": table["img"], "label": [label]}), damaged)
        refused(folder, r"row 0: the label is .*, expected a whole number from 0 on")
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), damaged)
    refused(folder, r"columns are \['x'\], expected one of")


def test_no_decoder_that_starts_programs_runs_and_nothing_huge_is_decoded(folder: Path) -> None:
    stream = io.BytesIO()
    Image.new("1", (2**14, 2**13)).save(stream, format="PNG")
    for cell, message in (
        ({"bytes": b"no picture", "path": None}, r"row 0: the picture is damaged"),
        ({"bytes": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "path": None}, "or none of JPEG, PNG"),
        ({"bytes": stream.getvalue(), "path": None}, "pixels, 67108864 are allowed"),
        ({"bytes": None, "path": "/etc/passwd"}, "the picture's bytes are not in the table"),
    ):
        table = pyarrow.table({"img": [cell], "label": [0]})
        pyarrow.parquet.write_table(table, folder / "train-00000-of-00001.parquet")
        refused(folder, message)


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_read_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    stream = io.BytesIO()
    Image.new("RGB", (32, 32), (9, 8, 7)).save(stream, format="PNG")
    cells = {"image": [{"bytes": stream.getvalue(), "path": None}] * 3, "label": [0, 1, 2]}
    split = datasets.Dataset.from_dict(cells).cast_column("image", datasets.Image())
    monkeypatch.setattr(datasets, "load_dataset", lambda name: {"train": split, "validation": split})
    train, test = load_splits(DataConfig(source="some/pictures", test_size=2), ModelConfig())
    assert train.labels.tolist() == [0, 1, 2] and len(test) == 2 and train.images[0, :, 0, 0].tolist() == [9, 8, 7]
    with pytest.raises(ValueError, match="a file format of `datasets`, not a data set of the hub"):
        load_splits(DataConfig(source="pandas"), ModelConfig())


def test_labels_beyond_the_models_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"labels 0 to 9, but model.num_labels=5 allows 0 to 4"):
        load_splits(DataConfig(source=str(folder)), ModelConfig(num_labels=5))


@pytest.fixture
def split() -> Split:
    generator = torch.Generator().manual_seed(0)
    return Split(torch.randint(0, 256, (23, 3, 32, 32), dtype=torch.uint8, generator=generator), torch.arange(23))


def labels_of(split: Split, **keys) -> list[list[int]]:
    return [labels.tolist() for _, labels in training_batches(split, 5, **keys)]


@pytest.mark.parametrize("augment", [False, True])
def test_batches_depend_on_seed_and_epoch_only(split: Split, augment: bool) -> None:
    first = list(training_batches(split, 5, seed=1, epoch=2, augment=augment))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    second = list(training_batches(split, 5, seed=1, epoch=2, augment=augment))
    assert torch.equal(state, torch.get_rng_state())
    assert len(first) == 4  # the last three pictures are dropped
    for (images, labels), (same_images, same_labels) in zip(first, second, strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)
    assert labels_of(split, seed=1, epoch=2) != labels_of(split, seed=1, epoch=3)
    assert labels_of(split, seed=1, epoch=2) != labels_of(split, seed=2, epoch=2)


def test_an_epoch_holds_every_picture_at_most_once_and_evaluation_all_in_order(split: Split) -> None:
    seen = [label for batch in labels_of(split, seed=0, epoch=0) for label in batch]
    assert len(seen) == len(set(seen)) == 20
    with pytest.raises(ValueError, match="batch_size=24 is more than the 23"):
        next(training_batches(split, 24, seed=0, epoch=0))
    batches = list(test_batches(split, 10))
    assert [len(labels) for _, labels in batches] == [10, 10, 3]
    assert torch.equal(torch.cat([images for images, _ in batches]), normalise(split.images))


def test_augmentation_shifts_and_mirrors_whole_pictures(split: Split) -> None:
    for original, changed in zip(split.images, augmented(split.images, torch.Generator().manual_seed(0)), strict=True):
        padded = torch.nn.functional.pad(original, (4, 4, 4, 4))
        windows = padded.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4).reshape(-1, 3, 32, 32)
        matches = (windows == changed).flatten(1).all(1) | (windows.flip(-1) == changed).flatten(1).all(1)
        assert matches.sum() == 1
