"""Checkpoints of torch.distributed.checkpoint, read without running what somebody has put into them."""

import builtins
import os
import pickle
import random
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.faults import Evil, change_index, put_into_planner_data
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import block, segments_of, uneven
from torch.distributed.checkpoint.api import CheckpointException

import zeroresize as zr
from zeroresize.checkpoints.index import read_index
from zeroresize.resharding.units.moving_units import move_units

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Kept:
    """A class of a user's."""

    def __init__(self, value):
        self.value = value


def written(folder):
    """Tensors of several kinds, and values that are none."""
    state = {
        "weight": torch.arange(6.0).view(2, 3),
        "nested": {"scale": torch.ones((), dtype=torch.bfloat16), "list": [torch.zeros(2, dtype=torch.int64), "text"]},
        "settings": {"lr": 0.1, "betas": (0.9, 0.999), "none": None},
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return state


def blank(state):
    """The same, without its values."""
    if isinstance(state, dict):
        return {key: blank(one) for key, one in state.items()}
    if isinstance(state, list):
        return list(map(blank, state))
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else "unread"


def loaded(folder, state, **options):
    dcp.load(state, storage_reader=zr.CheckpointReader(folder), no_dist=True, **options)
    return state


def refusal(folder):
    with pytest.raises((ValueError, CheckpointException)) as refused:
        loaded(folder, {"weight": torch.zeros(2, 3), "settings": {"lr": 0.0}})
    return str(refused.value)


def test_what_dcp_wrote_is_read(tmp_path):
    state = written(tmp_path)
    read = loaded(tmp_path, blank(state))
    assert torch.equal(read["weight"], state["weight"]) and torch.equal(read["nested"]["scale"], torch.tensor(1.0))
    assert read["nested"]["list"][1] == "text" and read["nested"]["list"][0].tolist() == [0, 0]
    assert read["settings"] == state["settings"]
    index = (tmp_path / ".metadata").read_bytes()
    with (tmp_path / ".metadata").open("rb") as stream:
        assert read_index(stream, "it") == pickle.loads(index)


def test_code_in_an_index_does_not_run(tmp_path):
    for number, change in enumerate((
        lambda index, evil: setattr(index, "planner_data", {"evil": evil}),
        lambda index, evil: index.storage_data.update({"evil": evil}),
        lambda index, evil: index.storage_meta.modules.append(evil),
        lambda index, evil: setattr(index, "of_another_torch", evil),
    )):  # fmt: skip
        folder, marker = tmp_path / str(number), tmp_path / f"marker{number}"
        written(folder)
        change_index(folder, lambda index, change=change, marker=marker: change(index, Evil(marker)))
        said = refusal(folder)
        assert ".metadata: not an index that torch.distributed.checkpoint wrote, refused: it names posix.system" in said
        assert not marker.exists()
        pickle.loads((folder / ".metadata").read_bytes())
        assert marker.exists(), "else the test tells nothing"


MODULE = "torch.distributed.checkpoint.metadata"


def test_what_is_no_index_is_refused(tmp_path):
    written(tmp_path)
    for program in (
        # What is named is no class of DCP's, though its module has one.
        f"c{MODULE}\nos\n.",
        "ctorch.serialization\nload\n.",
        "ctorch\nload\n(Vfile\ntR.",
        # A function of torch's may be called with what it is meant for only.
        "ctorch.serialization\n_get_layout\n(Vtorch.nn\ntR.",
        # A class itself is to be changed: state (None, {"from_a_file": True}) for a class, not for one of its objects.
        f"c{MODULE}\nMetadata\n(N(dVfrom_a_file\nI01\nstb.",
        # An object of the right class, with nothing in it; a class; a number.
        f"c{MODULE}\nMetadata\n)R.",
        f"c{MODULE}\nMetadata\n.",
        "I3\n.",
    ):
        (tmp_path / ".metadata").write_bytes(program.encode())
        assert "not an index that torch.distributed.checkpoint wrote" in refusal(tmp_path), program
    assert not hasattr(dcp.metadata.Metadata, "from_a_file")
    value = []  # what a pickle refers to often is looked at once
    for _ in range(24):
        value = [value, value]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    begin = time.perf_counter()
    assert "it holds a list" in refusal(tmp_path)
    assert time.perf_counter() - begin < 1.0


def test_a_damaged_index_is_refused_or_read_and_runs_nothing(tmp_path, monkeypatch):
    written(tmp_path)
    whole = (tmp_path / ".metadata").read_bytes()
    chance, imported = random.Random(0), []
    monkeypatch.setattr(builtins, "__import__", lambda name, *_, **__: imported.append(name) or 1 / 0)
    num_refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] = chance.randrange(256)
        (tmp_path / ".metadata").write_bytes(damaged)
        with (tmp_path / ".metadata").open("rb") as stream:
            try:
                read_index(stream, "it")
            except ValueError:
                num_refused += 1
    monkeypatch.undo()
    assert num_refused > 100 and not imported


def test_files_elsewhere_are_not_read(tmp_path):
    """Nor those of an inner folder, which may be a link to anywhere."""
    for path, said in (
        ("../outside", "is in ../outside, outside of the checkpoint"),
        ("/etc/passwd", "is in /etc/passwd, outside of the checkpoint"),
        ("a/../../b", "is in a/../../b, outside of the checkpoint"),
        ("inner/file", "'inner/file' is not the name of a file in it, refused"),
    ):
        folder = tmp_path / path.replace("/", " ")
        written(folder)
        change_index(
            folder,
            lambda index, path=path: [setattr(one, "relative_path", path) for one in index.storage_data.values()],
        )
        assert said in refusal(folder)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_what_is_no_plain_file_is_not_opened(tmp_path, name):
    """Reading of a device or a pipe would not end."""
    for target in ("/dev/zero", "outside", "pipe"):
        folder = tmp_path / f"saved {target[-4:]}"
        written(folder)
        (folder / name).replace(tmp_path / "outside")
        if target == "pipe":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to(tmp_path / target)
        assert f"{folder / name}: no plain file" in refusal(folder)


def test_a_value_that_is_no_tensor_runs_nothing_either(tmp_path):
    folder, marker = tmp_path / "saved", tmp_path / "marker"
    dcp.save({"value": Evil(marker)}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(CheckpointException, match=r"saved: value: not read, since it .*could run code.*posix.system"):
        loaded(folder, {"value": 0})
    assert not marker.exists()
    dcp.load({"value": 0}, checkpoint_id=folder, no_dist=True)
    assert marker.exists(), "else the test tells nothing"


def test_classes_that_the_user_trusts_are_read(tmp_path):
    dcp.save({"value": Kept(3)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointException, match=r"Kept.*allowed by torch.serialization.add_safe_globals"):
        loaded(tmp_path, {"value": 0})
    with torch.serialization.safe_globals([Kept]):
        assert loaded(tmp_path, {"value": 0})["value"].value == 3


@on_ranks(2)
def test_a_divided_model_its_optimizer_and_whatever_is_beside_them(rank, group, *, tmp_path):
    """As saving.md has it, on ranks of which one is given a tampered index in the end: all of them hear of it."""

    def training(seed, targets):
        model = block(group, seed)
        segments = segments_of(model, group)
        for segment in segments:
            for where in segment.tensors:
                where.owner.segment = segment
        optimizer = torch.optim.AdamW(model.parameters())
        move_units(segments, targets, process_group=group, optimizer=optimizer)
        model(torch.ones(3, 8, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return model, optimizer

    folder = tmp_path / "saved"
    targets = uneven(2)
    model, optimizer = training(0, targets)
    dcp.save({**zr.sharded_state_dict(model, optimizer), "step": 1}, checkpoint_id=folder, process_group=group)
    other, its_optimizer = training(1, targets)
    state = {**zr.sharded_state_dict(other, its_optimizer), "step": 0}
    dcp.load(state, storage_reader=zr.CheckpointReader(folder), process_group=group)
    assert state["step"] == 1
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(one, same) for one, same in pairs)
    for parameter, same in pairs:
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, its_optimizer.state[same][key])
    torch.distributed.barrier(group)
    if rank == 1:
        put_into_planner_data(folder, tmp_path / "marker")
    torch.distributed.barrier(group)
    with pytest.raises(CheckpointException, match=r"it names posix\.system"):
        dcp.load(state, storage_reader=zr.CheckpointReader(folder), process_group=group)
    assert not (tmp_path / "marker").exists()
