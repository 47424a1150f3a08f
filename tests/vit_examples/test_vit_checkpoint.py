"""Checkpoints of both hosts: training goes on as it was, damage is found before anything is loaded, no code runs."""

from __future__ import annotations

import importlib
import json
import operator
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
import torch.distributed.checkpoint as dcp

import zeroresize as zr
from vit_examples.checkpoint import EPOCHS, Progress, SavedState, layout_of
from vit_examples.config import RunConfig
from vit_examples.config_file import load_config
from vit_examples.harness import checkpoint_folders
from vit_examples.harness.all_ranks import of_all_ranks
from vit_examples.harness.checkpoint_files import read_saved_state, save_checkpoint
from vit_examples.harness.plain_files import read_state, write_state
from vit_examples.host import host_class
from zeroresize.optim.optimizers import torch_optimizer

HOSTS = ("torch", pytest.param("colossalai", marks=pytest.mark.colossalai))
PROGRESS = Progress(1, 4, [[0.5, 0.25]], {"host": "torch"}, ["abc1234"])


class Training:
    """A micro ViT in training on this rank, with whatever host; as many as a test likes, in ranks that have joined."""

    def __init__(self, config: RunConfig) -> None:
        if config.host == "colossalai":
            from colossalai.utils import set_seed

            from zeroresize.integrations.colossalai import prepare_accelerator

            prepare_accelerator()
            set_seed(config.training.seed)
        else:
            from vit_examples import host_torch

            host_torch._on_gpu = lambda: False
        self.config, self.host = config, host_class(config)(config)
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
        state = SavedState(layout_of(self.config, self.host.num_ranks), progress, self.host.loss_scale())
        model, optimizer = self.host.model, self.host.optimizer
        return save_checkpoint(folder, state, model, optimizer, keep=keep, balancer=self.balancer)

    def load(self, checkpoint: Path) -> Progress:
        saved = read_saved_state(checkpoint, layout_of(self.config, self.host.num_ranks), SavedState)
        saved.go_on(checkpoint, self.host, self.balancer)
        return saved.progress


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
    from zeroresize import GradScaler

    def train(rank: int, group: Any) -> list[dict[str, float]]:
        first, other = Training(micro_config(torch_host)), Training(micro_config(torch_host))
        first.host._scaler = GradScaler("cpu", init_scale=2.0**7, growth_interval=2, process_group=group)
        other.host._scaler = GradScaler("cpu", process_group=group)
        first.steps(0, 1, 2)
        assert first.save(tmp_path)
        other.load(tmp_path / "epoch-0001")
        return [one.host.loss_scale() for one in (first, other)]

    for saved, loaded in run_ranks(train, 2):
        assert loaded == saved
        assert (loaded["scale"], loaded["_growth_tracker"]) == (2.0**8, 1)


def test_settings_of_the_optimizer_are_those_of_the_run_that_goes_on(
    run_ranks, tmp_path: Path, torch_host: str
) -> None:
    """As its user was told when they differ from those of the run before."""

    def train(rank: int, group: Any) -> Any:
        first = Training(micro_config(torch_host, "training.weight_decay=0.1"))
        first.steps(0)
        assert first.save(tmp_path)
        other = Training(micro_config(torch_host, "training.weight_decay=0.3"))
        parameters = list(other.host.model.parameters())
        other.load(tmp_path / "epoch-0001")
        (settings,) = other.host.optimizer.param_groups
        assert all(map(operator.is_, settings["params"], parameters))
        return settings["weight_decay"]

    assert run_ranks(train, 2) == [0.3, 0.3]


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
        before = tensors_of(training)
        training.steps(2)
        now = tensors_of(training)
        assert not all(map(torch.equal, now, before))
        for what, path in paths.items():
            with pytest.raises(ValueError) as refused:
                training.load(path)
            said[what] = str(refused.value)
            assert all(map(torch.equal, now, tensors_of(training))), "something was loaded"
        return said

    by_rank = run_ranks(train, 2)
    return {what: [said[what] for said in by_rank] for what in by_rank[0]}


def tensors_of(training: Training) -> list[torch.Tensor]:
    """Copies of a model's parameters, and of AdamW's moments."""
    state = torch_optimizer(training.host.optimizer).state
    moments = [value for of_parameter in state.values() for value in of_parameter.values()]
    return [tensor.detach().clone() for tensor in (*training.host.model.parameters(), *moments)]


def copy_of(checkpoint: Path, number: int) -> Path:
    path = checkpoint.parent / f"copy{number}" / checkpoint.name
    shutil.copytree(checkpoint, path)
    return path


def test_a_tampered_file_runs_no_code_and_is_named(run_ranks, tmp_path: Path, host: str) -> None:
    """Whichever file of a checkpoint it is, also with a manifest that was tampered with as well."""
    marker = tmp_path / "marker"

    def tamper(checkpoint: Path) -> dict[str, Path]:
        copies = {}
        assert len(list(checkpoint.iterdir())) == 10
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
HALF_STATE = ({}, {"layout": {}}, {"loss_scale": [1.0]}, {"loss_scale": {"scale": 2.0}}, {"progress": {"epochs": 3}})


def test_foreign_files_are_refused_by_name_though_the_manifest_knows_them(
    run_ranks, tmp_path: Path, torch_host: str
) -> None:
    """Half a progress, of another epoch, and half a model, balancer or loss scale."""
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]}}).encode()
    of_unknown_dtype = struct.pack("<Q", len(header)) + header + bytes(6)

    def change(checkpoint: Path) -> dict[str, Path]:
        copies: dict[str, Path] = {}

        def changed(what: str) -> Path:
            path = copies[what] = copy_of(checkpoint, len(copies))
            return path

        whole = json.loads((checkpoint / "state.json").read_text())
        for half in HALF_PROGRESS:
            path = changed(f"state.json with progress {half}")
            is_changed_whole = isinstance(half, dict) and len(half) == 1 and half != {"epochs": 1}
            progress = {**whole["progress"], **half} if is_changed_whole else half
            (path / "state.json").write_text(json.dumps({**whole, "progress": progress}))
        for half in HALF_STATE:
            if list(half) == ["progress"]:
                half = {"progress": {**whole["progress"], **half["progress"]}}
            named = "epoch-0001" if half.keys() & {"layout", "loss_scale"} else "state.json"
            path = changed(f"{named} with {half}")
            (path / "state.json").write_text(json.dumps({**whole, **half} if half else half))
        (changed("balancer-rank1.json nested deep") / "balancer-rank1.json").write_text(
            '{"a": ' + "[" * 500 + "]" * 500 + "}"
        )
        path = changed("balancer-rank1.safetensors of a dtype that torch lacks")
        (path / "balancer-rank1.safetensors").write_bytes(of_unknown_dtype)
        path = changed("balancer-rank1.json halved")
        state = read_state(path / "balancer-rank1")
        del state["group 0-1"]
        write_state(path / "balancer-rank1", state)
        path = changed("balancer-rank0.safetensors emptied")
        write_state(path / "nothing", {})
        (path / "nothing.safetensors").replace(path / "balancer-rank0.safetensors")
        for path in copies.values():
            for file in path.glob("[bs]*.*"):
                resealed(path, file.name)
        return copies

    said = on_copies_of(run_ranks, tmp_path, micro_config(torch_host), change)
    for what, by_rank in said.items():
        assert all(what.partition(" ")[0] in one.splitlines()[0] for one in by_rank), (what, by_rank)


def test_tensors_that_do_not_fit_are_refused_by_name_before_any_is_loaded(
    run_ranks, tmp_path: Path, torch_host: str
) -> None:
    """Though the manifest knows them: of another dtype or shape, or without a moment; written as a run writes them."""

    def train(rank: int, group: Any) -> dict[str, str]:
        training = Training(micro_config(torch_host))
        training.steps(0, 1)
        assert training.save(tmp_path)
        name = "vit.encoder.layer.0.output.dense.weight"
        whole = {
            key: torch.zeros(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else 0
            for key, entry in zr.CheckpointReader(tmp_path / "epoch-0001").read_metadata().state_dict_metadata.items()
        }
        moment = f"optimizer.{name}.exp_avg"
        now, said = tensors_of(training), {}
        for number, (what, state) in enumerate(
            {
                f"{moment} of another dtype": {**whole, moment: whole[moment].half()},
                f"{moment} without": {key: value for key, value in whole.items() if key != moment},
                f"{name} of another shape": {**whole, name: torch.zeros(2, 2)},
            }.items()
        ):
            path = tmp_path / f"copy{number}" / "epoch-0001"
            if rank == 0:
                shutil.copytree(tmp_path / "epoch-0001", path)
                dcp.save(state, checkpoint_id=path, no_dist=True)
                for file in ("__0_0.distcp", ".metadata"):
                    resealed(path, file)
            group.barrier().wait()
            with pytest.raises(ValueError) as refused:
                training.load(path)
            said[what] = str(refused.value)
            assert all(map(torch.equal, now, tensors_of(training))), "something was loaded"
        return said

    for said in run_ranks(train, 2):
        for what, line in said.items():
            assert what.partition(" ")[0] in line.splitlines()[0], (what, line)
            assert line.endswith("and --resume starts anew")


def test_folders_that_are_no_checkpoints_are_left_alone(tmp_path: Path) -> None:
    assert EPOCHS.newest(tmp_path) is None
    for name in ("epoch-0002", "epoch-9999", "epoch-10000", "epoch-10001.tmp", "epoch-best", "epoch-", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "epoch-20000").touch()
    assert EPOCHS.newest(tmp_path) == tmp_path / "epoch-10000"


# ---- a disk that is full --------------------------------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize("full_ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("num_bytes", [0, 2000, 120_000])
def test_a_checkpoint_that_cannot_be_written_leaves_the_older_ones_and_training_goes_on(
    run_ranks, tmp_path: Path, torch_host: str, full_ranks: tuple[int, ...], num_bytes: int
) -> None:
    config = micro_config(torch_host)

    def train(rank: int, group: Any) -> Any:
        training = Training(config)
        training.steps(0)
        assert training.save(tmp_path, Progress(1, 1))
        warnings = []
        checkpoint_folders.logger.addFilter(lambda line: warnings.append(line.getMessage()))
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
        return was_written, left, warnings, sorted(path.name for path in tmp_path.glob("epoch-*"))

    (was_written, left, warnings, _), (other_was_written, *_, other_warnings, _) = run_ranks(train, 2)
    assert not was_written and not other_was_written
    assert left == ["epoch-0001"]
    (line,) = warnings
    assert line.startswith("no checkpoint of epoch 2, training goes on without (the newest is epoch-0001): rank ")
    what = f"balancer-rank{full_ranks[0]}.json: " if num_bytes < 120_000 else f"rank {full_ranks[0]}: "
    assert what in line and "File too large" in line, line
    assert other_warnings == []


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
    monkeypatch.setattr(EPOCHS, "delete", lambda old: done.append(f"delete {old.name}"))

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
