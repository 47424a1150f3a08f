"""What --dry-run checks and says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroresize as zr

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from helpers.runs import refused

from vit_examples.config import RunConfig
from vit_examples.config_file import READER
from vit_examples.dry_run import Requirements, dry_run
from vit_examples.host_torch import shard_vit
from vit_examples.model import build_vit
from vit_examples.train import main
from zeroresize.measure.saved_bytes import SavedBytes


def test_a_dry_run_counts_parameters_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--config=vit_1b", "--ranks=8", "--dry-run"])
    printed = capsys.readouterr().out
    assert "1,208,870,928" in printed
    assert "the configuration is sound" in printed


def test_a_dry_run_speaks_on_rank_0_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    main(["--config=demo", "--dry-run"])
    assert capsys.readouterr().out == ""


def test_every_row_of_memory_is_in_gib(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--config=vit_1b", "--ranks=8", "--dry-run"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    memory = {name.strip(): size.strip() for _, name, size, _ in (row.split("│") for row in rows[2:])}
    assert memory["AdamW moments, fp32"] == f"{8 * 151_576_578 / 2**30:.3f} GiB"
    parts = [float(size.removesuffix(" GiB")) for size in list(memory.values())[:5]]
    assert float(memory["together"].removesuffix(" GiB")) == pytest.approx(sum(parts), abs=0.003)
    assert len(memory) == 7 and all(size.endswith(" GiB") for size in memory.values())


@pytest.mark.parametrize("ranks", ["0", "-1"])
def test_a_dry_run_needs_a_rank(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--ranks {ranks}: at least 1 is needed" in refused(["--dry-run", f"--ranks={ranks}"], capsys)


def test_a_dry_run_says_whether_the_data_are_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZERORESIZE_CIFAR10", raising=False)
    file = tmp_path / "train.parquet"
    file.touch()
    for source, line in {
        "${ZERORESIZE_CIFAR10}": "warning: data: ${ZERORESIZE_CIFAR10} not found on this machine: "
        "the environment variable ZERORESIZE_CIFAR10 is not set",
        f"{tmp_path}/none": f"warning: data: {tmp_path}/none not found on this machine: no such folder",
        str(file): f"warning: data: {file} is a file, not a folder",
        str(tmp_path): f"data: {tmp_path}; the pictures were not opened",
        "some/name": "data: no folder some/name here, so the name of a data set on the Hugging Face hub; "
        "not looked for",
    }.items():
        main(["--config=demo", "--dry-run", f"--data={source}"])
        assert capsys.readouterr().out.splitlines()[0] == line


def test_a_dry_run_refuses_ranks_that_cannot_share_the_heads(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["--config=vit_1b", "--ranks=3", "--dry-run"], capsys)
    assert "model.num_heads=16 is not divisible by the 3" in said


TINY = (
    "--config=demo",
    "--mode=exact",
    "--set=host=torch",
    "--set=model={hidden_size: 8, depth: 1, num_heads: 4, mlp_size: 16, num_labels: 10, image_size: 32, "
    "patch_size: 16, position_std: 0.02}",
    "--set=training={batch_size: 2}",
)


def tiny_config(shares: str) -> RunConfig:
    return READER.from_arguments(READER.argument_parser().parse_args([*TINY, f"--set=balance.shares={shares}"]))


def needed(shares: str, ranks: int) -> list[Requirements]:
    return dry_run(tiny_config(shares), num_ranks=ranks)


@pytest.mark.parametrize(("shares", "ranks"), [("[2, 1]", 2), ("[5, 1]", 2), ("[1, 0]", 2), ("[2, 1, 1, 4]", 4)])
def test_uneven_shares_divide_what_even_ones_divide(shares: str, ranks: int) -> None:
    uneven, even = needed(shares, ranks), needed("even", ranks)
    assert len(set(even)) == 1 < len(set(uneven))
    for name in ("parameters", "weights", "gradients", "adamw", "activations"):
        assert sum(getattr(own, name) for own in uneven) == sum(getattr(own, name) for own in even)


def test_what_each_rank_needs_by_hand() -> None:
    """Of 4 heads of size 2 rank 0 owns 3 by shares of 3 to 1, of 16 neurons 12."""
    split_0, split_1 = (
        {
            "q, k, v": 3 * (8 + 1) * heads * 2,  # weights and biases
            "output projection": 8 * heads * 2,
            "fc1": (8 + 1) * neurons,
            "fc2": 8 * neurons,
        }
        for heads, neurons in ((3, 12), (1, 4))
    )
    replicated = {
        "patches": 8 * 3 * 16 * 16 + 8,
        "class token and positions": 8 + 5 * 8,
        "biases of row-parallel layers": 8 + 8,
        "three layer norms": 3 * 2 * 8,
        "classifier": 10 * 8 + 10,
    }
    expected = [sum(own.values()) + sum(replicated.values()) for own in (split_0, split_1)]
    ranks = needed("[3, 1]", 2)
    assert [own.parameters for own in ranks] == expected
    assert [own.weights for own in ranks] == [4 * number for number in expected]
    assert [own.adamw for own in ranks] == [8 * number for number in expected]
    # 2 pictures of 5 tokens, 4 bytes each: on every rank 4 H and 4 numbers of layer norms, and of each rank's part 5
    # times a head's size and one number, and 2 a neuron; besides the picture, and H and 2 of the last layer norm.
    activations = [
        4 * 2 * (5 * (4 * 8 + 4 + 5 * heads * 2 + heads + 2 * neurons + 8 + 2) + 3 * 32 * 32)
        for heads, neurons in ((3, 12), (1, 4))
    ]
    assert [own.activations for own in ranks] == activations


def test_ranks_hold_what_the_dry_run_says(run_ranks: Callable[..., list[Any]]) -> None:
    config = tiny_config("[3, 1]")

    def held_after_a_step(rank: int, group: Any) -> tuple[int, ...]:
        model = shard_vit(build_vit(config.model, num_ranks=2, seed=0), group)
        zr.convert(model, process_group=group)
        optimizer = torch.optim.AdamW(model.parameters())
        zr.Balancer(model, optimizer, config.balance).close()  # it divides
        model(torch.randn(2, 3, 32, 32)).logits.square().mean().backward()
        optimizer.step()
        parameters = list(model.parameters())
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        kinds = parameters, [parameter.grad for parameter in parameters], moments
        return tuple(sum(tensor.untyped_storage().nbytes() for tensor in kind) for kind in kinds)

    needed = dry_run(config, num_ranks=2)
    assert run_ranks(held_after_a_step, 2) == [(own.weights, own.gradients, own.adamw) for own in needed]


UNEVEN = (
    *("--config=demo", "--mode=exact", "--set=host=torch"),
    "--set=model={hidden_size: 96, depth: 3, num_heads: 6, num_labels: 10, image_size: 32, patch_size: 4, "
    "position_std: 0.02}",
    "--set=training={batch_size: 2}",
)


def uneven_config(limits: str, *more: str) -> RunConfig:
    arguments = [*UNEVEN, f"--set=balance.memory_limits={limits}", *more]
    return READER.from_arguments(READER.argument_parser().parse_args(arguments))


def test_bytes_by_memory_are_those_that_ranks_of_2_to_1_memory_hold(run_ranks: Callable[..., list[Any]]) -> None:
    """To the byte what does not depend on the batch, within 5 % with activations, which are an estimate."""
    config = uneven_config("[7500000, 3750000]")

    def held_in_training(rank: int, group: Any) -> tuple[float, float, float]:
        model = shard_vit(build_vit(config.model, num_ranks=2, seed=0), group)
        zr.convert(model, process_group=group)
        optimizer = torch.optim.AdamW(model.parameters())
        balancer = zr.Balancer(model, optimizer, config.balance.replace(update_every=1))
        images = torch.randn(2, 3, 32, 32)
        for _ in range(2):  # what is exchanged at an update is known at the next
            model(images).logits.square().mean().backward()
            optimizer.step()
            balancer.step()
        by_balancer = balancer.metrics()["balance/memory_bytes"]
        balancer.close()
        saved = SavedBytes(model, (images,))
        model(images)
        saved.end()
        parameters = list(model.parameters())
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        static = sum(one.nbytes for one in (*parameters, *(own.grad for own in parameters), *moments))
        return static, saved.total, by_balancer

    needed, limits = dry_run(config, num_ranks=2), (7.5e6, 3.75e6)
    for needs, limit, (static, saved, by_balancer) in zip(needed, limits, run_ranks(held_in_training, 2), strict=True):
        assert needs.total - needs.activations == static
        assert needs.total == pytest.approx(static + saved, rel=0.05)
        assert by_balancer == pytest.approx(static + saved, rel=0.05)
        assert needs.total < limit
    assert needed[0].parameters > 1.3 * needed[1].parameters


def test_memory_that_does_not_suffice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for limits, why in {
        "[2000000, 1000000]": "balance.memory_limits, activations not counted: rank 0 would hold",
        "[5000000, 2500000]": "even where all ranks fill the same part of their memory, rank 0 would hold",
        "[1e9]": "numbers of bytes for 1 ranks, and the group has 2",
    }.items():
        assert why in refused([*UNEVEN, "--dry-run", "--ranks=2", f"--set=balance.memory_limits={limits}"], capsys)


def test_ranks_that_begin_over_their_limit_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    main([*UNEVEN, "--dry-run", "--ranks=2", "--set=balance.memory_limits=[7500000, 3750000]",
          "--set=balance.shares=[1, 1]"])  # fmt: skip
    said = " ".join(capsys.readouterr().out.split())
    assert "with activations rank 1 would be over the limit" in said and "begin with balance.shares=[1." in said
    main([*UNEVEN, "--dry-run", "--ranks=2", "--set=balance.memory_limits=[7500000, 3750000]"])
    assert "over the limit" not in capsys.readouterr().out


@pytest.mark.parametrize("more", [["--mode=zero-pri"], ["--set=balance.moves=false"]])
def test_ranks_that_would_stay_over_their_limit_are_refused(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*UNEVEN, "--dry-run", "--ranks=2", "--set=balance.memory_limits=[7500000, 3750000]"]
    said = refused([*arguments, "--set=balance.shares=[1, 1]", *more], capsys)
    assert "and no units move in this mode: shares that fit are [1." in said


def test_a_column_is_of_ranks_that_need_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--config=vit_1b", "--mode=exact", "--ranks=8", "--dry-run", "--set=balance.shares=[2,3,2,1,2,2,2,2]"])
    lines = capsys.readouterr().out.splitlines()
    (headings,) = [line for line in lines if "what" in line]
    assert [cell.strip() for cell in headings.strip("┃").split("┃")][1:] == ["ranks 0, 2, 4–7", "rank 1", "rank 3"]
    assert any("parameters, each rank" in line for line in lines)


def test_shares_that_will_be_measured_are_taken_to_be_even(capsys: pytest.CaptureFixture[str]) -> None:
    assert needed("auto", 2) == needed("even", 2)
    assert capsys.readouterr().out.count("shares are measured when training begins; these are even ones\n") == 1


def test_shares_that_do_not_fit_the_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused([*TINY, "--dry-run", "--ranks=2", "--set=balance.shares=[2, 1, 1]"], capsys)
    assert "shares=(2.0, 1.0, 1.0) is not allowed: wanted are 'even', 'auto', or 2 numbers, one for each rank" in said
