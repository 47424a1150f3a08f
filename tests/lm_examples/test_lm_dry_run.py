"""What a run would need, found on the meta device, against what stages really hold."""

import pytest
import torch
from helpers.language_models import config_of, text_of
from rich.console import Console

from lm_examples.dry_run import activation_bytes, dry_run
from lm_examples.run import prepare
from lm_examples.train import train_step
from zeroresize.pipeline import LayerProfiler


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_are_those_of_a_real_run(run_ranks, tmp_path, dtype):
    model = {"hidden_size": 32, "context": 32, "num_blocks": 2}
    config = config_of(
        tmp_path, model=model, balance={"mode": "off"}, sleep={"forward_s": 0}, training={"dtype": dtype}
    )

    def profile(rank, group):
        run = prepare(config, text_of(), group, resume=False)
        with run.held:
            run.step = 1
            run.clock.start()
            train_step(run)
            with LayerProfiler(run.pipeline, run.optimizer) as profiler:
                train_step(run)
            return profiler.gather()

    layers = run_ranks(profile, 2)[0].layers
    needs = dry_run(config, num_stages=2, console=Console(quiet=True))
    for need, held, layers_here in zip(needs, (2, 1), (layers[:2], layers[2:]), strict=True):
        assert need.weights == sum(one.weight_bytes for one in layers_here)
        assert need.gradients == sum(one.gradient_bytes for one in layers_here)
        assert need.optimizer == pytest.approx(sum(one.optimizer_bytes for one in layers_here), rel=0.01)
        numbers = range(2) if held == 2 else range(2, 4)
        assert need.activations == held * sum(activation_bytes(config, number) for number in numbers)
    logits = 2 * 32 * 256 * getattr(torch, dtype).itemsize  # belong to the loss, which is no layer
    measured = [one.activation_bytes for one in layers]
    assert [activation_bytes(config, number) for number in (1, 2)] == pytest.approx(measured[1:3], rel=0.05)
    assert activation_bytes(config, 3) == pytest.approx(measured[3] + logits, rel=0.05)


def test_it_prints_one_row_for_each_stage(tmp_path):
    console = Console(record=True, width=160)
    needs = dry_run(config_of(tmp_path), num_stages=3, console=console)
    said = console.export_text()
    assert [own.layers for own in needs] == ["embedding, blocks 0 to 1", "blocks 2 to 4", "block 5, head"]
    assert "3 stages, 1f1b, case none, float64, 4 micro-batches of 2 × 8 tokens" in said
    assert all(own.layers in said for own in needs) and not any(tmp_path.iterdir())


def test_memory_limits_that_nothing_fits_are_refused_and_tight_ones_told(tmp_path):
    needs = dry_run(config_of(tmp_path), num_stages=2, console=Console(quiet=True))
    whole = sum(own.total for own in needs)
    with pytest.raises(ValueError, match=r"balance\.memory_limits: no partition of 8 layers over 2 stages fits"):
        dry_run(config_of(tmp_path, balance={"memory_limits": [whole / 4, whole / 4]}), num_stages=2)
    console = Console(record=True, width=160)
    dry_run(config_of(tmp_path, balance={"memory_limits": [0.4 * whole, 2 * whole]}), num_stages=2, console=console)
    said = console.export_text()
    assert "stage 0 is over its limit (balance.memory_limits)" in said and "stage 1 is over" not in said
