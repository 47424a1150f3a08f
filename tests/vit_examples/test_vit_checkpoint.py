"""Checkpoints of both hosts: training goes on as it was, damage is found before anything is loaded, no code runs."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.faults import Evil, files_of_at_most, resealed

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import torch
from safetensors.torch import load_file, save_file

import zeroresize as zr
from vit_examples import checkpoint as checkpoints
from vit_examples import checkpoint_folders
from vit_examples.all_ranks import of_all_ranks
from vit_examples.checkpoint import Progress, layout_of, load_checkpoint, newest_checkpoint, require_layout
from vit_examples.config import RunConfig
from vit_examples.config_file import load_config
from vit_examples.plain_files import read_state, write_state

HOSTS = ("torch", pytest.param("colossalai", marks=pytest.mark.colossalai))
PROGRESS = Progress(1, 4, [[0.5, 0.25]], {"host": "torch"}, ["abc1234"])


class Training:
    """A micro ViT in training on this rank, with whatever host; as many as a test likes, in ranks that have joined."""

    def __init__(self, config: RunConfig) -> None:
        if config.host == "colossalai":
            from colossalai.utils import set_seed

            from vit_examples import host_colossalai
            from zeroresize.integrations.colossalai import prepare_accelerator

            class Host(host_colossalai.ColossalAIHost):
                @staticmethod
                def _join(config: RunConfig) -> None:
                    prepare_accelerator()
                    set_seed(config.training.seed)
        else:
            from vit_examples import host_torch

            class Host(host_torch.TorchHost):  # type: ignore[no-redef]
                @staticmethod
                def _join(config: RunConfig) -> torch.device:
                    return torch.device("cpu")

        self.config, self.host = config, Host(config)
        zr.convert(self.host.model, process_group=self.host.tp_group)
        self.balancer = zr.Balancer(
            self.host.model, self.host.optimizer, process_group=self.host.tp_group, config=config.balance
        )

    def steps(self, *numbers: int) -> list[float]:
        losses = []
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            images = torch.randn(4, 3, 32, 32, generator=generator)
            logits = self.host.forward(images)
            loss = torch.nn.functional.cross_entropy(logits.float(), torch.arange(4))
            self.host.backward(loss)
            self.host.step()
            self.balancer.step()
            losses.append(loss.item())
        return losses

    def save(self, folder: Path, progress: Progress = PROGRESS, keep: int = 2) -> bool:
        layout = layout_of(self.config, self.host.num_ranks)
        return checkpoints.save_checkpoint(
            folder, progress, host=self.host, balancer=self.balancer, layout=layout, keep=keep
        )

    def load(self, checkpoint: Path) -> Progress:
        require_layout(checkpoint, layout_of(self.config, self.host.num_ranks))
        return load_checkpoint(checkpoint, host=self.host, balancer=self.balancer)


def micro_config(host: str, *overrides: str) -> RunConfig:
    settings = [
        f"host={host}",
        "model={hidden_size: 32, depth: 1, num_heads: 2, num_labels: 10, image_size: 32, patch_size: 8}",
        "training={batch_size: 4, lr: 0.003, grad_clip: 0.5}",
        "balance={mode: zero-pri, update_every: 2, priority: variation, ratio: 0.5, ranks: all}",
        "balance.paper.imputation=same",
        *overrides,
    ]
    return load_config("demo", settings)


def needs(host: str, request: pytest.FixtureRequest) -> None:
    """What the ranks inherit of it, imported in the parent."""
    if host == "colossalai":
        request.getfixturevalue("colossalai_vit_modules")
    importlib.import_module(f"vit_examples.host_{host}")


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> str:
    needs(request.param, request)
    return request.param


@pytest.fixture
def torch_host(request: pytest.FixtureRequest) -> str:
    needs("torch", request)
    return "torch"


@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_goes_on_to_the_bit(run_ranks, tmp_path: Path, host: str, precision: str) -> None:
    config = micro_config(host, f"training.precision={precision}")

    def train(rank: int, group: Any) -> Any:
        first = Training(config)
        first.steps(0, 1)
        assert first.save(tmp_path)
        columns = first.balancer.pruned_steps()
        other = Training(config)
        other.steps(7)  # so that something is there that must not stay
        progress = other.load(tmp_path / "epoch-0001")
        same = {name: (steps == columns[name]).all() for name, steps in other.balancer.pruned_steps().items()}
        return progress == PROGRESS, all(same.values()), first.steps(2, 3, 4), other.steps(2, 3, 4)

    for progress_is_same, columns_are_same, uninterrupted, resumed in run_ranks(train, 2):
        assert progress_is_same and columns_are_same
        assert resumed == uninterrupted


def test_a_loss_scale_goes_on_where_it_was(run_ranks, tmp_path: Path, torch_host: str) -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    def train(rank: int, group: Any) -> list[dict[str, float]]:
        first, other = Training(micro_config(torch_host)), Training(micro_config(torch_host))
        first.host._scaler = ShardedGradScaler("cpu", init_scale=2.0**7, growth_interval=2, process_group=group)
        other.host._scaler = ShardedGradScaler("cpu", process_group=group)
        first.steps(0, 1, 2)
        assert first.save(tmp_path)
        other.load(tmp_path / "epoch-0001")
        return [one.host.loss_scale() for one in (first, other)]

    for saved, loaded in run_ranks(train, 2):
        assert loaded == saved
        assert (loaded["scale"], loaded["_growth_tracker"]) == (2.0**8, 1)


@pytest.mark.slow
def test_a_checkpoint_of_before_the_first_step_is_loaded(run_ranks, tmp_path: Path, host: str) -> None:
    """In fp16 the first steps may all be skipped, while the loss scale is sought."""
    config = micro_config(host)

    def train(rank: int, group: Any) -> Any:
        first, other = Training(config), Training(config)
        assert first.save(tmp_path)
        other.steps(7)
        other.load(tmp_path / "epoch-0001")
        return first.steps(0, 1), other.steps(0, 1)

    for uninterrupted, resumed in run_ranks(train, 2):
        assert resumed == uninterrupted


# ---- what is in a checkpoint ----------------------------------------------------------------------------------------


def evil_files(marker: Path) -> dict[str, bytes]:
    """Files whose reading by pickle, or by torch.load without weights_only, touches ``marker``."""
    saved = marker.with_name("evil.pt")
    torch.save(Evil(marker), saved)
    return {"pickle": pickle.dumps(Evil(marker)), "torch": saved.read_bytes()}


def on_copies_of(
    run_ranks: Callable[..., Any], folder: Path, config: RunConfig, changes: Callable[[Path], dict[str, Path]]
) -> dict[str, list[str]]:
    """Save a checkpoint, and load changed copies of it: what each rank says of each, by the name of the change.

    Args:
        changes: makes the copies of a checkpoint; their paths by name.
    """

    def train(rank: int, group: Any) -> dict[str, str]:
        training = Training(config)
        training.steps(0, 1)
        assert training.save(folder)
        paths = of_all_ranks(changes(folder / "epoch-0001") if rank == 0 else None)[0]
        said = {}
        before = [parameter.detach().clone() for parameter in training.host.model.parameters()]
        training.steps(2)
        now = [parameter.detach().clone() for parameter in training.host.model.parameters()]
        assert not all(map(torch.equal, now, before))
        for what, path in paths.items():
            with pytest.raises(ValueError) as refused:
                training.load(path)
            said[what] = str(refused.value)
            assert all(map(torch.equal, now, training.host.model.parameters())), "something was loaded"
        return said

    by_rank = run_ranks(train, 2)
    return {what: [said[what] for said in by_rank] for what in by_rank[0]}


def copy_of(checkpoint: Path, number: int) -> Path:
    path = checkpoint.parent / f"copy{number}" / checkpoint.name
    shutil.copytree(checkpoint, path)
    return path


def test_a_tampered_file_runs_no_code_and_is_named(run_ranks, tmp_path: Path, host: str) -> None:
    """Whichever file of a checkpoint it is, also with a manifest that was tampered with as well."""
    marker = tmp_path / "marker"

    def tamper(checkpoint: Path) -> dict[str, Path]:
        copies = {}
        assert len(list(checkpoint.iterdir())) == 9
        for kind, content in evil_files(marker).items():
            for file in checkpoint.iterdir():
                path = copy_of(checkpoint, len(copies))
                (path / file.name).write_bytes(content)
                if file.name != "manifest.json":
                    resealed(path, file.name)
                copies[f"{kind} {file.name}"] = path
        return copies

    said = on_copies_of(run_ranks, tmp_path, micro_config(host), tamper)
    assert not marker.exists()
    for what, by_rank in said.items():
        name = what.partition(" ")[2]
        assert all(name in one.splitlines()[0] for one in by_rank), by_rank
    pickle.loads(evil_files(marker)["pickle"])
    assert marker.exists(), "else the test tells nothing"


def test_a_flipped_bit_or_a_missing_end_is_found_before_anything_is_loaded(
    run_ranks, tmp_path: Path, host: str
) -> None:
    """In the middle of each file."""

    def damage(checkpoint: Path) -> dict[str, Path]:
        copies = {}
        for file in checkpoint.iterdir():
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 4
            for kind, changed in (("flipped", bytes(content)), ("cut", content[:-1]), ("gone", None)):
                path = copy_of(checkpoint, len(copies))
                (path / file.name).unlink()
                if changed is not None:
                    (path / file.name).write_bytes(changed)
                copies[f"{kind} {file.name}"] = path
        return copies

    said = on_copies_of(run_ranks, tmp_path, micro_config(host), damage)
    for what, by_rank in said.items():
        name = what.partition(" ")[2]
        if what == "flipped manifest.json":  # it may flip what is told of any file
            name = ""
        assert all(name in one for one in by_rank), (what, by_rank)
        assert all(one.endswith("and --resume starts anew") and "Delete " in one for one in by_rank)


HALF_PROGRESS = ({}, [], {"epochs": 1}, {"epochs": "1"}, {"steps": -4}, {"step_seconds": [0.5]}, {"commits": None})


def test_foreign_files_are_refused_by_name_though_the_manifest_knows_them(
    run_ranks, tmp_path: Path, torch_host: str
) -> None:
    """Half a progress, of another epoch, and half a shard, state or loss scale."""

    def change(checkpoint: Path) -> dict[str, Path]:
        copies: dict[str, Path] = {}
        whole = json.loads((checkpoint / "progress.json").read_text())
        for half in (*HALF_PROGRESS, {"epochs": 3}):
            path = copies[f"progress.json {half}"] = copy_of(checkpoint, len(copies))
            is_changed_whole = isinstance(half, dict) and len(half) == 1 and half != {"epochs": 1}
            (path / "progress.json").write_text(json.dumps({**whole, **half} if is_changed_whole else half))
            resealed(path, "progress.json")
        path = copies["rank1.safetensors of another rank"] = copy_of(checkpoint, len(copies))
        tensors = {"a": torch.zeros(1)}
        checkpoints.write_state(path / "rank1", tensors)  # tensors by number
        resealed(path, "rank1.safetensors")
        tensors = load_file(checkpoint / "rank1.safetensors")
        name = next(name for name in tensors if name.startswith("optimizer."))
        for what, changed in {
            "of another dtype": {**tensors, name: tensors[name].half()},
            "without a moment": {key: value for key, value in tensors.items() if key != name},
        }.items():
            path = copies[f"rank1.safetensors {what}"] = copy_of(checkpoint, len(copies))
            save_file(changed, path / "rank1.safetensors")
            resealed(path, "rank1.safetensors")
        path = copies["balancer-rank1.json nested deep"] = copy_of(checkpoint, len(copies))
        (path / "balancer-rank1.json").write_text('{"a": ' + "[" * 500 + "]" * 500 + "}")
        resealed(path, "balancer-rank1.json")
        for file in ("rank1.safetensors", "balancer-rank1.safetensors"):
            path = copies[f"{file} of a dtype that torch lacks"] = copy_of(checkpoint, len(copies))
            header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]}}).encode()
            (path / file).write_bytes(struct.pack("<Q", len(header)) + header + bytes(6))
            resealed(path, file)
        path = copies["balancer-rank1.json halved"] = copy_of(checkpoint, len(copies))
        state = read_state(path / "balancer-rank1")
        del state["group 0-1"]
        write_state(path / "balancer-rank1", state)
        for name in ("balancer-rank1.json", "balancer-rank1.safetensors"):
            resealed(path, name)
        path = copies["balancer-rank0.safetensors emptied"] = copy_of(checkpoint, len(copies))
        checkpoints.write_state(path / "nothing", {})
        (path / "nothing.safetensors").replace(path / "balancer-rank0.safetensors")
        resealed(path, "balancer-rank0.safetensors")
        return copies

    said = on_copies_of(run_ranks, tmp_path, micro_config(torch_host), change)
    for what, by_rank in said.items():
        assert all(what.partition(" ")[0] in one.splitlines()[0] for one in by_rank), (what, by_rank)


def test_folders_that_are_no_checkpoints_are_left_alone(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for name in ("epoch-0002", "epoch-9999", "epoch-10000", "epoch-10001.tmp", "epoch-best", "epoch-", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "epoch-20000").touch()
    assert newest_checkpoint(tmp_path) == tmp_path / "epoch-10000"


# ---- a disk that is full --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("full_ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("num_bytes", [0, 2000])
def test_a_checkpoint_that_cannot_be_written_leaves_the_older_ones_and_training_goes_on(
    run_ranks, tmp_path: Path, torch_host: str, full_ranks: tuple[int, ...], num_bytes: int
) -> None:
    config = micro_config(torch_host)

    def train(rank: int, group: Any) -> Any:
        training = Training(config)
        training.steps(0)
        assert training.save(tmp_path, Progress(1, 1))
        told = []
        checkpoint_folders.logger.addFilter(lambda line: told.append(line.getMessage()))
        if rank in full_ranks:
            with files_of_at_most(num_bytes):
                was_written = training.save(tmp_path, Progress(2, 2), keep=1)
        else:
            was_written = training.save(tmp_path, Progress(2, 2), keep=1)
        group.barrier().wait()
        left = sorted(path.name for path in tmp_path.glob("epoch-*"))
        training.load(tmp_path / "epoch-0001")
        training.steps(1)
        assert training.save(tmp_path, Progress(3, 3), keep=1)
        group.barrier().wait()
        return was_written, left, told, sorted(path.name for path in tmp_path.glob("epoch-*"))

    (was_written, left, told, _), (other_was_written, *_, others_told, _) = run_ranks(train, 2)
    assert not was_written and not other_was_written
    assert left == ["epoch-0001"]
    (line,) = told
    assert line.startswith("no checkpoint of epoch 2, training goes on without (the newest is epoch-0001): rank ")
    assert f"rank{full_ranks[0]}.safetensors: " in line
    assert others_told == []


def test_a_folder_that_is_a_file_costs_the_checkpoint_only(run_ranks, tmp_path: Path, torch_host: str) -> None:
    (tmp_path / "checkpoints").touch()

    def train(rank: int, group: Any) -> bool:
        training = Training(micro_config(torch_host))
        training.steps(0)
        return training.save(tmp_path / "checkpoints")

    assert run_ranks(train, 2) == [False, False]


def test_a_checkpoint_is_on_the_disk_before_older_ones_are_deleted(
    run_ranks, tmp_path: Path, torch_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def fsync(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.is_dir():
            done.append(path.name)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(checkpoints._FOLDERS, "delete", lambda old: done.append(f"delete {old.name}"))

    def train(rank: int, group: Any) -> list[str]:
        training = Training(micro_config(torch_host))
        assert training.save(tmp_path / "all", Progress(1))
        done.clear()
        assert training.save(tmp_path / "all", Progress(2), keep=1)
        return done

    assert run_ranks(train, 2)[0] == ["epoch-0002.tmp", "all", "delete epoch-0001"]


def test_as_many_checkpoints_as_asked_for_are_kept(run_ranks, tmp_path: Path, torch_host: str) -> None:
    """The newest, also where their numbers have more digits; nothing is left of one that was not quite deleted."""
    (tmp_path / "epoch-0001.tmp").mkdir()

    def train(rank: int, group: Any) -> list[str]:
        training = Training(micro_config(torch_host))
        training.steps(0)
        for epochs in (9998, 9999, 10000):
            assert training.save(tmp_path, Progress(epochs, 1), keep=2)
        group.barrier().wait()
        return sorted(path.name for path in tmp_path.glob("epoch*"))

    assert run_ranks(train, 2)[0] == ["epoch-10000", "epoch-9999"]
