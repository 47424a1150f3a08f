"""Bytes as tokens: the same batches wherever and whenever, of files that are not held out."""

import pytest
import torch
from helpers.language_models import text_of

from lm_examples.data import Files, TokenBatches, read_files
from lm_examples.sections import DataConfig


def files_of(folder, **data):
    return read_files(DataConfig(folder=str(folder), **data))


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


def letters(texts):
    return {chr(letter) for letter in b"".join(texts)}


def test_files_are_either_for_training_or_held_out(folder):
    files = files_of(folder, held_out=0.3)
    held_out, training = letters(files.held_out), letters(files.training)
    assert len(held_out) == 3 and held_out | training == set("abcdefghij") and not held_out & training
    assert list(map(len, files.training)) == [50] * 7


def test_order_and_share_depend_on_names_alone(folder):
    first = files_of(folder)
    (folder / "part0" / "0.py").rename(folder / "old")
    (folder / "old").rename(folder / "part0" / "0.py")
    assert files_of(folder).digest == first.digest
    (folder / "part0" / "0.py").write_bytes(b"x" * 50)
    assert files_of(folder).digest != first.digest


def test_reading_ends_with_the_file_that_fills_max_bytes(folder):
    files = files_of(folder, max_bytes=120)
    assert len(files.training) + len(files.held_out) == 3


def test_too_little_text_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"data\.folder=.*no such folder"):
        files_of(tmp_path / "nowhere")
    for texts in ([], [b"x"] * 4, [b"\n" * 50]):
        with pytest.raises(ValueError, match=r"data\.folder=.* bytes for training are too few for sequences of a=4"):
            Files(texts, [b"x" * 5]).require(DataConfig(), 4, "a=4")


def test_batches_depend_on_seed_and_step_and_targets_follow_inputs():
    text = text_of()

    def batches(seed):
        return TokenBatches(text, batch_size=6, context=8, seed=seed)

    inputs, targets = batches(3).training(5)
    again, _ = batches(3).training(5)
    assert inputs.shape == targets.shape == (6, 8) and inputs.dtype == torch.int64
    assert torch.equal(inputs, again) and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(inputs, batches(3).training(6)[0]) and not torch.equal(inputs, batches(4).training(5)[0])
    assert torch.equal(batches(3).validation(0)[0], batches(4).validation(0)[0])
    small = Files([bytes(range(8, 0, -1))], text.held_out)
    inputs, targets = TokenBatches(small, batch_size=50, context=7, seed=0).training(1)
    assert inputs.max() == 8 and targets.min() == 0
