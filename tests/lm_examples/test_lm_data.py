"""Bytes as tokens: the same batches wherever and whenever, of files that are not held out."""

import pytest
import torch
from helpers.language_models import text_of

from lm_examples.data import Batches, Text, load_text
from lm_examples.gpt import ModelConfig
from lm_examples.pipeline_config import RunConfig
from lm_examples.sections import DataConfig


def config_of(folder, context=4, **data):
    return RunConfig(model=ModelConfig(context=context), data=DataConfig(folder=folder and str(folder), **data))


@pytest.fixture
def folder(tmp_path):
    for number in range(10):
        path = tmp_path / f"part{number % 3}" / f"{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([97 + number]) * 50)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "foreign.py").write_bytes(b"!" * 500)
    (tmp_path / "notes.txt").write_bytes(b"?" * 500)
    return tmp_path


def letters(data):
    return {chr(one) for one in data.tolist()} - {"\0"}


def test_files_are_either_for_training_or_held_out(folder):
    text = load_text(config_of(folder, held_out=0.3))
    held_out, training = letters(text.held_out), letters(text.training)
    assert len(held_out) == 3 and held_out | training == set("abcdefghij") and not held_out & training
    assert len(text.training) == 7 * 51


def test_order_and_share_depend_on_names_alone(folder):
    first = load_text(config_of(folder))
    (folder / "part0" / "0.py").rename(folder / "old")
    (folder / "old").rename(folder / "part0" / "0.py")
    again = load_text(config_of(folder))
    assert first.digest == again.digest
    (folder / "part0" / "0.py").write_bytes(b"x" * 50)
    assert load_text(config_of(folder)).digest != first.digest


def test_reading_ends_with_the_file_that_fills_max_bytes(folder):
    text = load_text(config_of(folder, max_bytes=120))
    assert len(text.training) + len(text.held_out) == 3 * 51


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "nowhere", "no such folder"),
        (lambda path: path, "0 bytes for training are too few"),
    ],
)
def test_too_little_text_is_an_error(tmp_path, make, message):
    with pytest.raises(ValueError, match=message) as refused:
        load_text(config_of(make(tmp_path)))
    assert "data.folder=" in str(refused.value)


def test_batches_depend_on_seed_and_step_and_targets_follow_inputs():
    text = text_of()

    def batches(seed):
        return Batches(text, batch_size=6, context=8, seed=seed)

    inputs, targets = batches(3).training(5)
    again, _ = batches(3).training(5)
    assert inputs.shape == targets.shape == (6, 8) and inputs.dtype == torch.int64
    assert torch.equal(inputs, again) and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(inputs, batches(3).training(6)[0]) and not torch.equal(inputs, batches(4).training(5)[0])
    assert torch.equal(batches(3).validation(0)[0], batches(4).validation(0)[0])
    small = Text(torch.arange(9, dtype=torch.uint8), text.held_out)
    inputs, targets = Batches(small, batch_size=50, context=7, seed=0).training(1)
    assert inputs.min() == 0 and targets.max() == 8
