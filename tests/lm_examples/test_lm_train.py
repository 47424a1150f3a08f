"""Trainings of language models on real ranks, of each feed: the losses of undivided training, also after resuming."""

import json
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.faults import full_disk_on_rank_1, put_into_planner_data, saying_status, sigterm_at, writable_by_all
from helpers.language_models import NUM_STEPS, by_hand, config_of, keep_time, losses_of, text_of, trained, undivided
from helpers.planning import fork_planners
from helpers.processes import forked_training

from lm_examples.cases.dynamic_case import DynamicCase
from lm_examples.config import READER
from lm_examples.data import Files
from lm_examples.feed import Feed
from lm_examples.layers import summed_loss
from lm_examples.train import FEEDS, main, prepare, train
from vit_examples.harness import checkpoints
from zeroresize.microbatch.padded import PaddedBatch, PairBatch
from zeroresize.pipeline import LayerProfiler
from zeroresize.policy.microbatches.plan import MicroBatch
from zeroresize.strategy.packed import Packed
from zeroresize.utils.files import read_json_lines

STRAGGLER = {"rank": 0, "chi": 4, "from_step": 3}
SOURCES = Path(__file__).resolve().parents[2] / "lm_examples" / "cases"


def same(value):
    return pytest.approx(value, rel=1e-10, abs=0.0)


@pytest.mark.parametrize(("num_stages", "schedule"), [(2, "gpipe"), (4, "1f1b")])
def test_losses_are_those_of_undivided_training_wherever_layers_move(run_ranks, tmp_path, num_stages, schedule):
    config = config_of(tmp_path, straggler=STRAGGLER, pipeline={"schedule": schedule})
    first, *others = run_ranks(lambda rank, group: trained(config, group), num_stages)
    losses, validation_loss = undivided(config)
    assert losses_of(tmp_path) == same(losses)
    assert all(one["validation_loss"] == same(validation_loss) for one in (first, *others))
    moves = [one for one in read_json_lines(tmp_path / "pipeline.jsonl") if one["kind"] == "layers"]
    assert first["moves"] == len(moves) == 1
    assert all(move["step"] > 3 and move["after"][1] < move["before"][1] for move in moves)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 2), (1, 4), (2, 1)])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened_on_any_number_of_stages(run_ranks, tmp_path, before, after):
    sections = {"straggler": STRAGGLER, "output": {"save_every": 5}}
    half = config_of(tmp_path, training={"steps": 11}, **sections)
    (tmp_path / "checkpoints" / "step-00000003.tmp").mkdir(parents=True)  # as a kill may leave it
    first = run_ranks(lambda rank, group: trained(half, group), before)[0]
    whole = config_of(tmp_path, **sections)
    second = run_ranks(lambda rank, group: trained(whole, group, resume=True), after)[0]
    losses, validation_loss = undivided(whole)
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))  # 11 was trained again
    assert losses_of(tmp_path) == same(losses) and second["validation_loss"] == same(validation_loss)
    if before == after:
        assert tuple(lines[10]["boundaries"]) == tuple(first["boundaries"]) != (0, 4, 8)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-00000005", "step-00000010"]


def test_what_does_not_go_on_is_refused_on_every_rank(run_ranks, tmp_path):
    output = {"save_every": 1}
    config = config_of(tmp_path, training={"steps": 1}, output=output)
    others = [config_of(tmp_path, output=output, **{name: change}) for name, change in
              (("model", {"hidden_size": 16}), ("training", {"dtype": "float32"}))]  # fmt: skip

    def refused(config, group, *, resume, text):
        with pytest.raises(ValueError) as error, ExitStack() as held:
            prepare(config, group, held, resume=resume, files=text)
        return str(error.value)

    def check(rank, group):
        trained(config, group)
        said = [refused(other, group, resume=True, text=text_of()) for other in others]
        return [*said, *(refused(config, group, resume=False, text=text_of(seed)) for seed in (0, rank))]

    for model, dtype, earlier, differ in run_ranks(check, 2):
        assert all("of another layout, nothing was loaded" in said and "--output" in said for said in (model, dtype))
        assert f"{tmp_path} holds an earlier run: add --resume" in earlier
        assert "the ranks do not agree on the data" in differ


def test_a_save_that_fails_leaves_the_one_before_and_training_goes_on(run_ranks, tmp_path, monkeypatch):
    config = config_of(tmp_path, training={"steps": 4}, output={"save_every": 2, "keep": 1})

    def check(rank, group):
        works, calls = checkpoints.dcp.save, []

        def failing(*arguments, **options):
            calls.append(1)
            if len(calls) == 2:
                raise checkpoints.CheckpointException("", {1: (OSError("disk full"), None)})
            return works(*arguments, **options)

        monkeypatch.setattr(checkpoints.dcp, "save", failing)
        return trained(config, group)["steps"]

    assert run_ranks(check, 2) == [4, 4]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_damaged_file_is_named_with_a_way_out(run_ranks, tmp_path):
    config = config_of(tmp_path, training={"steps": 2}, output={"save_every": 2})

    def check(rank, group):
        trained(config, group)
        for name in ("__1_0.distcp", "state.json", ".metadata"):
            path = tmp_path / "checkpoints" / "step-00000002" / name
            whole = path.read_bytes()
            group.barrier().wait()
            if rank == 0:
                path.write_bytes(whole[: len(whole) // 2])
            group.barrier().wait()
            with pytest.raises(ValueError) as refused:
                trained(config, group, resume=True)
            said = str(refused.value)
            assert "step-00000002" in said and "--resume goes on from what is left" in said
            group.barrier().wait()
            if rank == 0:
                path.write_bytes(whole)
            group.barrier().wait()

    run_ranks(check, 2)


def test_layers_are_measured_in_the_two_steps_after_their_work_has_changed(run_ranks, tmp_path, monkeypatch):
    config = config_of(tmp_path, balance={"profile_every": 100})

    def check(rank, group):
        measured, enter, text = [], LayerProfiler.__enter__, text_of()
        monkeypatch.setattr(DynamicCase, "after_step", lambda own, pipeline, optimizer, step, loss: step in (4, 5))
        keep_time()
        with ExitStack() as held:
            feed = prepare(config, group, held, resume=False, files=text)
            monkeypatch.setattr(LayerProfiler, "__enter__", lambda own: measured.append(feed.step) or enter(own))
            train(feed)
        return measured

    assert run_ranks(check, 2) == [[2, 5, 6, 7]] * 2


def test_ranks_leave_and_the_losses_are_those_of_undivided_training(run_ranks, tmp_path):
    releases = tmp_path / "releases"
    releases.mkdir()
    command = ["sh", "-c", f"echo gone > {releases}/{{rank}}"]
    repack = {"mode": "on", "max_slowdown": 10.0, "least_stages": 2, "release_command": command}
    config = config_of(tmp_path / "run", repack=repack)
    first, second, third = run_ranks(lambda rank, group: trained(config, group), 3)
    losses, validation_loss = undivided(config)
    assert losses_of(tmp_path / "run") == same(losses) and first["validation_loss"] == same(validation_loss)
    assert len(first["boundaries"]) == 3 and first["steps"] == second["steps"] == config.training.steps
    assert third == {} and [one.name for one in releases.iterdir()] == ["2"]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["small", "switching_two_ranks"])
def test_no_code_runs_at_resume_and_not_everybody_may_write_to_what_a_run_makes(tmp_path, config):
    folder, marker = tmp_path / "run", tmp_path / "marker"
    sizes = ["--set=model={num_blocks: 2, hidden_size: 8, num_heads: 2}", f"--data={SOURCES}", f"--output={folder}"]
    given = [f"--config={config}", *sizes, "--steps=1", "--set=output.save_every=1"]
    first = forked_training(given, tmp_path / "first", lambda: os.umask(0), main)
    assert first.returncode == 0, first.stderr
    assert json.loads((folder / "summary.json").read_text())["steps"] == 1 and writable_by_all(folder) == []
    (checkpoint,) = (folder / "checkpoints").iterdir()
    put_into_planner_data(checkpoint, marker)
    second = forked_training([*given, "--steps=2", "--resume"], tmp_path / "second", main=main)
    assert not marker.exists() and second.returncode == 2, second.stderr
    assert f"{checkpoint}: cannot be loaded: " in second.stderr and "it names posix.system" in second.stderr
    assert "Traceback" not in second.stderr


SIZES = ["--set=model={num_blocks: 2, hidden_size: 8, num_heads: 2}", f"--data={SOURCES}", "--set=training.log_every=1"]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "step"), [("small", 2), ("switching_two_ranks", 2)])
def test_all_ranks_have_the_status_of_sigterm_where_its_checkpoint_cannot_be_saved(tmp_path, config, step):
    def before():
        full_disk_on_rank_1()
        sigterm_at(step, Feed, "count")

    given = [f"--config={config}", *SIZES, "--steps=3", f"--output={tmp_path / 'run'}"]
    ended = forked_training(given, tmp_path / "ended", before, saying_status(main))
    assert ended.returncode == 0 and ended.stdout.count("status 143, left\n") == 2, ended.stdout + ended.stderr
    assert f"SIGTERM: ended after step {step}, not saved; no checkpoint is written yet" in ended.stderr
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("config", ["small", "switching_two_ranks", "gpt"])
def test_sigterm_to_one_rank_saves_and_the_resumed_run_equals_the_uninterrupted_one(tmp_path, config):
    given = [f"--config={config}", *SIZES, "--steps=6"]
    folders = through, cut = [tmp_path / name for name in ("through", "cut")]
    for said, folder, before, *more in (
        ("first", through, lambda: None),
        ("second", cut, lambda: sigterm_at(3, Feed, "count")),
        ("third", cut, lambda: None, "--resume"),
    ):
        if (through / "costs.json").exists():  # so that all plan alike; measuring takes half a minute
            more.append(f"--set=microbatches.costs={through / 'costs.json'}")
        ended = forked_training([*given, f"--output={folder}", *more], tmp_path / said, before, main)
        assert ended.returncode == 0, ended.stderr
        if said == "second":
            (checkpoint,) = (cut / "checkpoints").iterdir()
            assert (
                f"SIGTERM: ended after step 3; the same command with --resume goes on after step 3, from {checkpoint}"
                in ended.stderr
            )
            assert list(losses_of(cut)) == [1, 2, 3] and not (cut / "summary.json").exists()
    by_run = list(map(losses_of, folders))
    assert len(by_run[0]) == 6 and by_run[0] == by_run[1]


SWITCHING = {"ranges": [{"up_to": 6, "strategy": [2, 1, 1]}, {"up_to": 24, "strategy": [1, 2, 1]}]}


def strategies_config(folder, strategies=SWITCHING, **sections):
    """A tiny model; ``sections`` change single keys of theirs."""
    values = {
        "model": {"num_blocks": 2, "hidden_size": 8, "num_heads": 2, "mlp_size": 8},
        "data": {"lengths": "files", "max_length": 24},
        "training": {"steps": 6, "tokens": 120, "max_tokens": 24, "lr": 0.01, "dtype": "float64", "log_every": 1},
        "output": {"folder": str(folder), "progress": False, "save_every": 3},
    }
    changed = {name: values.get(name, {}) | section for name, section in sections.items()}
    return READER.from_dict({"feed": "strategies", **values, **changed, "strategies": strategies})


def random_files(lengths, held_out=None):
    random = np.random.default_rng(0)
    return Files(*([random.bytes(length) for length in part] for part in (lengths, held_out or lengths)))


DOCUMENTS = random_files((2, 3, 4, 5, 9, 14, 40))
SAMPLES = random_files((400,), (300,))


def strategies_by_hand(config):
    batches, layers = FEEDS["strategies"].batches_of(config, DOCUMENTS), torch.nn.ModuleList(config.layers())

    def loss_of(rows):
        packed = Packed.of(rows)
        x = packed.tokens
        for layer in layers:
            x = layer(x, packed)
        return summed_loss(x, packed) / packed.num_tokens

    return by_hand(config, layers, loss_of, lambda step: (batches.training(step),), [(batches.validation(0),)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "num_ranks"),
    [
        ({"ranges": [{"up_to": 6, "strategy": [2, 2, 1]}, {"up_to": 24, "strategy": [1, 1, 4]}],
          "optimizer_strategy": [1, 2, 2]}, 4),
        ({"static": {"tp": 2, "shares": [1, 0]}}, 2),
        ({"search": True, "max_ranges": 2}, 2),
    ],
)  # fmt: skip
def test_a_run_resumed_under_other_strategies_equals_undivided_training(run_ranks, tmp_path, after, num_ranks):
    half, whole = strategies_config(tmp_path, training={"steps": 4}), strategies_config(tmp_path, after)
    run_ranks(lambda rank, group: trained(half, group, files=DOCUMENTS), 2)
    summaries = run_ranks(lambda rank, group: trained(whole, group, resume=True, files=DOCUMENTS), num_ranks)
    losses, validation_loss = strategies_by_hand(whole)
    assert losses_of(tmp_path) == same(losses)
    assert [one["validation_loss"] for one in summaries] == pytest.approx([validation_loss] * num_ranks, rel=1e-10)
    first = read_json_lines(tmp_path / "metrics.jsonl")[0]
    assert sum(value for name, value in first["ranges"].items() if name.endswith("tokens")) == 120


def test_mixed_precision_and_overlap_are_keys_and_losses_are_those_of_one_strategy(run_ranks, tmp_path):
    types = {"dtype": "float32", "compute_dtype": "bfloat16"}
    runs = {
        "switched": strategies_config(tmp_path / "switched", {**SWITCHING, "overlap": True}, training=types),
        "both": strategies_config(tmp_path / "both", training={**types, "gradient_dtype": "bfloat16"}),
        "static": strategies_config(tmp_path / "static", {"static": [2, 1, 1]}, training=types),
    }

    def train_all(rank, group):
        return {name: trained(run, group, files=DOCUMENTS)["loss"] for name, run in runs.items()}

    losses = run_ranks(train_all, 2)[0]
    for name in ("switched", "both"):
        assert losses[name] == pytest.approx(losses["static"], rel=2**-8)  # bfloat16's precision


def microbatches_config(folder, kind="gpt", **sections):
    """A tiny model; ``sections`` change single keys of theirs."""
    values = {
        "model": {"kind": kind, "num_blocks": 1, "hidden_size": 8, "num_heads": 2, "mlp_size": 8},
        "data": {"max_length": 40, "max_target": 20},
        "training": {"steps": 5, "tokens": 300, "lr": 0.01, "dtype": "float64", "log_every": 1},
        "microbatches": {"most_rows": 4, "recompute": ["none"]},
        "parallel": {"pp": 2},
        "output": {"folder": str(folder), "progress": False},
    }
    changed = {name: values.get(name, {}) | section for name, section in sections.items()}
    return READER.from_dict({"feed": "microbatches", **values, **changed})


def microbatches_by_hand(config):
    samples, layers = FEEDS["microbatches"].batches_of(config, SAMPLES), torch.nn.ModuleList(config.layers())

    def loss_of(made, lengths):
        kind = PaddedBatch if config.model.kind == "gpt" else PairBatch
        batch = kind.of(made, MicroBatch.of(range(len(made)), lengths))
        x = batch.inputs
        for layer in layers:
            x = layer(x, batch)
        return summed_loss(x, batch) / lengths[:, -1].sum()

    def batch_of(step):
        return samples.training(step - 1), samples.lengths(step - 1)

    return by_hand(config, layers, loss_of, batch_of, [(samples.held_out(0), samples.lengths.held_out(0))])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "t5"])
def test_planned_micro_batches_resumed_in_their_midst_equal_undivided_training(run_ranks, tmp_path, monkeypatch, kind):
    """Batches are the same, and the run goes on spread otherwise."""
    fork_planners(monkeypatch)
    half = microbatches_config(tmp_path, kind, training={"steps": 3}, output={"save_every": 2})
    whole = microbatches_config(tmp_path, kind, parallel={"dp": 2, "pp": 1})
    run_ranks(lambda rank, group: trained(half, group, files=SAMPLES), 2)
    summaries = run_ranks(lambda rank, group: trained(whole, group, resume=True, files=SAMPLES), 2)
    losses, validation_loss = microbatches_by_hand(whole)
    assert losses_of(tmp_path) == pytest.approx(losses, rel=1e-10)
    assert [each["validation_loss"] for each in summaries] == pytest.approx([validation_loss] * 2, rel=1e-10)
    assert 0.0 <= summaries[0]["padding"] < 0.8
    assert json.loads((tmp_path / "costs.json").read_text())["device"] == "CPU"


@pytest.mark.slow
def test_a_rank_that_is_slow_gets_fewer_samples(run_ranks, tmp_path, monkeypatch):
    """Blocks sleep, so that what two ranks take depends little on what else the machine does."""
    fork_planners(monkeypatch)
    config = microbatches_config(
        tmp_path,
        training={"steps": 24},
        parallel={"dp": 2, "pp": 1},
        sleep={"token_s": 1e-4},
        straggler={"rank": 1, "chi": 3.0, "from_step": 6},
    )
    run_ranks(lambda rank, group: _in_real_time(config, group), 2)
    changes = read_json_lines(tmp_path / "changes.jsonl")
    assert changes and changes[0]["expected_step_s"] < changes[0]["step_s"]


def _in_real_time(config, group):
    with ExitStack() as held:
        feed = prepare(config, group, held, resume=False, files=SAMPLES)
        train(feed)
        feed.leave()
