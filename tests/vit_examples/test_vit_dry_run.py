"""What the dry run of a vision transformer says each rank needs: by hand, and as ranks hold it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from helpers.runs import refused

import zeroresize as zr
from vit_examples.config import RunConfig, load_config
from vit_examples.dry_run import dry_run
from vit_examples.harness.dry_run import Needs
from vit_examples.host_torch import shard_vit
from vit_examples.model import build_vit
from vit_examples.train import main

TINY = (
    "balance.mode=exact",
    "host=torch",
    "model={hidden_size: 8, depth: 1, num_heads: 4, mlp_size: 16, patch_size: 16}",
    "training={batch_size: 2}",
)


def tiny_config(*changes: str) -> RunConfig:
    return load_config("demo", [*TINY, *changes])


def needed(shares: str, ranks: int) -> list[Needs]:
    return dry_run(tiny_config(f"balance.shares={shares}"), ranks)


def test_what_each_rank_needs_by_hand() -> None:
    """Of 4 heads of size 2 rank 0 owns 3 by shares of 3 to 1, of 16 neurons 12."""
    # q, k, v with biases, the output's projection, both products of the feed-forward part.
    splits = [3 * 9 * heads * 2 + 8 * heads * 2 + 9 * neurons + 8 * neurons for heads, neurons in ((3, 12), (1, 4))]
    # Patches, class token and positions, biases of row-parallel layers, layer norms, classifier.
    replicated = (8 * 3 * 16 * 16 + 8) + (8 + 5 * 8) + 16 + 3 * 2 * 8 + (10 * 8 + 10)
    ranks = needed("[3, 1]", 2)
    assert [one.parameters for one in ranks] == [split + replicated for split in splits]
    assert [one.optimizer for one in ranks] == [8 * (split + replicated) for split in splits]
    # 2 pictures of 5 tokens, 4 bytes each: on every rank 4 H and 4 numbers of layer norms, and of each rank's part 5
    # times a head's size and one number, and 2 a neuron; besides the picture, and H and 2 of the last layer norm.
    assert [one.activations for one in ranks] == [
        4 * 2 * (5 * (4 * 8 + 4 + 5 * heads * 2 + heads + 2 * neurons + 8 + 2) + 3 * 32 * 32)
        for heads, neurons in ((3, 12), (1, 4))
    ]


def test_ranks_hold_what_the_dry_run_says(run_ranks: Callable[..., list[Any]]) -> None:
    config = tiny_config("balance.shares=[3, 1]")

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

    expected = [(one.weights, one.gradients, one.optimizer) for one in dry_run(config, 2)]
    assert run_ranks(held_after_a_step, 2) == expected


def test_memory_limits_are_obeyed_told_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = dry_run(tiny_config("balance.shares=auto", "balance.memory_limits=[250000, 125000]"), 2)
    assert first.parameters > second.parameters
    assert "shares are measured when training begins; these are by memory" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"balance\.memory_limits, activations not counted"):
        dry_run(tiny_config("balance.memory_limits=[1000, 1000]"), 2)


def test_the_command_prints_a_table_and_refuses_ranks_that_cannot_share_the_heads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZERORESIZE_CIFAR10", raising=False)
    main(["--config=vit_1b", "--ranks=8", "--dry-run"])
    said = capsys.readouterr().out
    assert "0 to 7" in said and "the whole model has 1,208,870,928 parameters" in said
    assert "the environment variable ZERORESIZE_CIFAR10 is not set" in said
    assert "balance mode zero-pri: the configuration is sound" in said
    assert "model.num_heads=16 is not divisible by the 3" in refused(
        ["--config=vit_1b", "--ranks=3", "--dry-run"], capsys
    )
