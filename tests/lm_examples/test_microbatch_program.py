"""The program that trains in planned micro-batches: its losses, resuming in the midst, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from helpers.planning import fork_planners
from rich.console import Console

from lm_examples.microbatches.blocks import summed_loss
from lm_examples.microbatches.config_file import READER, load_config
from lm_examples.microbatches.dry_run import dry_run
from lm_examples.microbatches.run import prepare
from lm_examples.microbatches.tasks import TaskLengths, TaskSamples
from lm_examples.train_microbatches import main, train
from zeroresize.microbatch.padded import PaddedBatch, PairBatch
from zeroresize.policy.microbatches.micro_batch import MicroBatch
from zeroresize.utils.json_lines import read_json_lines

NUM_STEPS = 5


def config_of(folder, kind="gpt", **sections):
    """A tiny model; ``sections`` change single keys of theirs."""
    values = {
        "model": {"kind": kind, "num_blocks": 1, "hidden_size": 8, "num_heads": 2, "mlp_size": 8},
        "data": {"max_length": 40, "max_target": 20},
        "training": {"steps": NUM_STEPS, "tokens": 300, "lr": 0.01, "dtype": "float64"},
        "microbatches": {"most_rows": 4, "recompute": ["none"]},
        "parallel": {"pp": 2},
        "output": {"folder": str(folder), "progress": False},
    }
    changed = {name: values.get(name, {}) | section for name, section in sections.items()}
    return READER.from_dict({**values, **changed})


def samples_of(config):
    random = np.random.default_rng(0)
    return TaskSamples([random.bytes(400)], [random.bytes(300)], config.lengths)


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Planners start at once."""
    fork_planners(monkeypatch)


def trained(config, group, *, resume=False):
    run = prepare(config, samples_of(config), group, resume=resume)
    with run.held:
        summary = train(run)
    if run.balancer is not None:
        run.balancer.close()
    run.planners.close()
    run.store.close()
    return summary


def undivided(config):
    """Losses by step, and the validation loss, of training as anybody would write it."""
    training, samples = config.training, samples_of(config)
    torch.manual_seed(training.seed)
    layers = torch.nn.ModuleList(config.layers())
    optimizer = torch.optim.AdamW(layers.parameters(), lr=training.lr, weight_decay=training.weight_decay)

    def loss_of(made, lengths):
        rows = [tuple(map(torch.from_numpy, sample)) for sample in made]
        kind = PaddedBatch if config.model.kind == "gpt" else PairBatch
        rows = [row[0] for row in rows] if config.model.kind == "gpt" else rows
        batch = kind.of(rows, MicroBatch.of(range(len(rows)), lengths))
        x = batch.inputs
        for layer in layers:
            x = layer(x, batch)
        return summed_loss(x, batch) / lengths[:, -1].sum()

    losses = {}
    for step in range(training.steps):
        optimizer.zero_grad()
        loss = loss_of(samples.training(step), samples.lengths(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), training.grad_clip)
        optimizer.step()
        losses[step + 1] = loss.item()
    with torch.no_grad():
        return losses, loss_of(samples.held_out(0), samples.lengths.held_out(0)).item()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "t5"])
def test_a_run_resumed_in_its_midst_equals_undivided_training(run_ranks, tmp_path, kind):
    """Its batches are the same, and it goes on spread otherwise."""
    half = config_of(tmp_path, kind, training={"steps": 3}, output={"save_every": 2})
    whole = config_of(tmp_path, kind, parallel={"dp": 2, "pp": 1})
    run_ranks(lambda rank, group: trained(half, group), 2)
    summaries = run_ranks(lambda rank, group: trained(whole, group, resume=True), 2)
    losses, validation_loss = undivided(whole)
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    assert {line["step"]: line["loss"] for line in lines} == pytest.approx(losses, rel=1e-10)
    assert [each["validation_loss"] for each in summaries] == pytest.approx([validation_loss] * 2, rel=1e-10)
    assert 0.0 <= summaries[0]["padding"] < 0.8 and summaries[0]["steps"] == NUM_STEPS
    assert json.loads((tmp_path / "costs.json").read_text())["device"] == "CPU"


@pytest.mark.slow
def test_a_rank_that_is_slow_gets_fewer_samples(run_ranks, tmp_path):
    """Blocks sleep, so that what two ranks take depends little on what else the machine does."""
    config = config_of(
        tmp_path,
        training={"steps": 24},
        parallel={"dp": 2, "pp": 1},
        sleep={"token_s": 1e-4},
        straggler={"rank": 1, "chi": 4.0, "from_step": 6},
        output={"save_every": 24},
    )
    run_ranks(lambda rank, group: trained(config, group), 2)
    changes = read_json_lines(tmp_path / "changes.jsonl")
    assert changes and changes[0]["what"] == "replan" and changes[0]["step"] >= 6
    assert changes[0]["expected_step_s"] < 0.8 * changes[0]["step_s"]  # ideally 0.4, when all of χ is known
    losses, _ = undivided(config)
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    assert {line["step"]: line["loss"] for line in lines} == pytest.approx(losses, rel=1e-9)


@pytest.mark.slow
def test_costs_that_were_kept_are_used_and_those_of_another_model_refused(run_ranks, tmp_path):
    first = config_of(tmp_path / "first", training={"steps": 1})
    run_ranks(lambda rank, group: trained(first, group), 2)
    costs = {"costs": str(tmp_path / "first" / "costs.json")}
    again = config_of(tmp_path / "again", training={"steps": 1}, microbatches=costs)
    assert run_ranks(lambda rank, group: trained(again, group)["steps"], 2) == [1, 1]
    assert not (tmp_path / "again" / "costs.json").exists()

    def refused(rank, group):
        for number, (changes, message) in enumerate(
            (
                ({"model": {"mlp_size": 16}}, "the costs are of another model: layer 1"),
                ({"microbatches": costs | {"recompute": ["layers"]}}, r"nothing is known of recomputing \['layers'\]"),
                ({"microbatches": {"costs": str(tmp_path / "nothing")}}, "No such file"),
            )
        ):
            config = config_of(tmp_path / f"{number}", **({"microbatches": costs} | changes))
            with pytest.raises(ValueError, match=message):
                prepare(config, samples_of(config), group, resume=False)

    run_ranks(refused, 2)
    console = Console(record=True, width=120)
    dry_run(again, 2, console=console)
    text = console.export_text()
    assert "samples of a mini-batch" in text and "plans by costs of CPU" in text


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"microbatches": {"method": "magic"}}, "microbatches: method='magic'"),
        ({"microbatches": {"recompute": ["heads"]}}, "microbatches.recompute"),
        ({"microbatches": {"recompute": []}}, "microbatches.recompute"),
        ({"microbatches": {"memory_limit": -1.0}}, "memory_limit"),
        ({"microbatches": {"workers": 0}}, "microbatches.workers"),
        ({"parallel": {"dp": 0}}, "parallel: strategy dp"),
        ({"parallel": {"pp": 2, "boundaries": [0, 3]}}, "parallel: .*boundaries"),
        ({"data": {"max_length": 1}}, "data.max_length"),
        ({"data": {"scale": 0.0}}, "data.scale"),
        ({"model": {"vocabulary": 7}}, "model.vocabulary=7"),
        ({"sleep": {"token_s": -1.0}}, "sleep.token_s"),
        ({"balance": {"mode": "maybe"}}, "balance.mode"),
        ({"balance": {"min_saving": 1.0}}, "balance.min_saving"),
        ({"straggler": {"rank": -1}}, "straggler.rank"),
        ({"straggler": {"chi": 0.5}}, "straggler.chi"),
    ],
)
def test_configurations_that_are_not_allowed_are_named(tmp_path, sections, message):
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, **sections)


def test_divisions_that_do_not_fit_are_named_before_anything_starts(tmp_path):
    for parallel, num_ranks, message in (
        ({"pp": 2}, 3, "= 2 ranks are needed, and there are 3"),
        ({"pp": 4}, 4, "parallel: .*"),
        ({"tp": 4, "pp": 1}, 4, "do not divide by tp=4"),
    ):
        with pytest.raises(ValueError, match=message):
            config_of(tmp_path, parallel=parallel).validate_ranks(num_ranks)


def test_a_mistake_ends_the_program_with_a_line(capsys):
    for arguments, message in (
        (["--set", "microbatches.metod=tokens"], "did you mean 'method'"),
        (["--dry-run", "--ranks", "3"], "2 ranks are needed, and there are 3"),
        (["--config", "gpt"], "torchrun --nproc-per-node 2 -m lm_examples.train_microbatches"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2 and message in capsys.readouterr().err
    for name in ("gpt", "t5"):
        assert load_config(name).model.kind == name


def test_samples_are_as_long_as_was_told_before_and_the_same_for_a_seed():
    for is_joined in (True, False):
        lengths = TaskLengths(is_joined, 500, 60, 20, 0.5, seed=3)
        random = np.random.default_rng(0)
        samples = TaskSamples([random.bytes(900)], [random.bytes(300)], lengths)
        for iteration in range(3):
            drawn, made = lengths(iteration), samples.training(iteration)
            wanted = [[len(sample[0]) - 1] if is_joined else list(map(len, sample)) for sample in made]
            assert drawn.tolist() == wanted
            assert (drawn <= ([60] if is_joined else [60, 20])).all()
            again = samples.training(iteration)
            assert all(
                (first == other).all()
                for a, b in zip(made, again, strict=True)
                for first, other in zip(a, b, strict=True)
            )
        assert lengths(0).tolist() != lengths(1).tolist() != TaskLengths(is_joined, 500, 60, 20, 0.5, 4)(1).tolist()
        held_out = [
            each.tolist() for each in (lengths.held_out(0), TaskLengths(is_joined, 500, 60, 20, 0.5).held_out(0))
        ]
        assert held_out[0] == held_out[1]
    with pytest.raises(ValueError, match="bytes of text for training are too few"):
        TaskSamples([b"short"], [b"short"], lengths)


def test_targets_are_what_the_instruction_says():
    lengths = TaskLengths(False, 600, 30, 10, 0.5)
    text = np.random.default_rng(1).integers(4, 256, 500).astype(np.uint8).tobytes()
    for source, target in TaskSamples([text], [text], lengths).training(0):
        rest = np.frombuffer(text, dtype=np.uint8)
        if source[0] == 1:
            assert target.tolist() == source[1 : len(target) + 1].tolist()
        elif source[0] == 2:
            assert target.tolist() == source[1 : len(target) + 1][::-1].tolist()
        else:
            run = bytes([*source[1:].tolist(), *target.tolist()])
            assert source[0] == 3 and run in rest.tobytes()
