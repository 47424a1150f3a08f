"""The program that trains under switched strategies: its losses, resuming elsewhere, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.processes import forked_training
from rich.console import Console

from lm_examples.documents import Documents, MiniBatches, Pieces
from lm_examples.llama import llama_layers, token_loss
from lm_examples.switching.config_file import READER, load_config
from lm_examples.switching.dry_run import dry_run, rank_needs, token_bytes
from lm_examples.switching.run import prepare
from lm_examples.train_strategies import main, train
from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.packed import Packed
from zeroresize.utils.json_lines import read_json_lines

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 6


def ranges_of(short, long, **more):
    return {"ranges": [{"up_to": 6, "strategy": short}, {"up_to": 24, "strategy": long}], **more}


SWITCHING = ranges_of([2, 1, 1], [1, 2, 1])


def config_of(folder, strategies=SWITCHING, **sections):
    """A tiny model; ``sections`` change single keys of theirs."""
    values = {
        "model": {"num_blocks": 2, "hidden_size": 8, "num_heads": 2, "mlp_size": 8},
        "data": {"max_length": 24},
        "training": {"steps": NUM_STEPS, "tokens": 120, "max_tokens": 24, "lr": 0.01, "dtype": "float64"},
        "output": {"folder": str(folder), "progress": False},
    }
    changed = {name: values.get(name, {}) | own for name, own in sections.items()}
    return READER.from_dict({**values, **changed, "strategies": strategies})


def documents_of():
    random = np.random.default_rng(0)
    training, held_out = ([random.bytes(length) for length in (2, 3, 4, 5, 9, 14, 40)] for _ in range(2))
    return Documents(Pieces(training, 24), Pieces(held_out, 24), "these")


def trained(config, group, *, resume=False):
    run = prepare(config, documents_of(), group, resume=resume)
    with run.held:
        return train(run)


def undivided(config):
    """Losses by step, and the validation loss, of training as anybody would write it."""
    training, batches = config.training, MiniBatches(documents_of(), tokens=config.training.tokens, seed=0)
    torch.manual_seed(training.seed)
    layers = torch.nn.ModuleList(one.double() for one in llama_layers(config.model))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=training.lr, weight_decay=training.weight_decay)

    def loss_of(rows):
        packed = Packed.of(rows)
        x = packed.tokens
        for layer in layers:
            x = layer(x, packed)
        return token_loss(x, packed) / packed.num_tokens

    losses = {}
    for step in range(1, training.steps + 1):
        optimizer.zero_grad()
        loss = loss_of(batches.training(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), training.grad_clip)
        optimizer.step()
        losses[step] = loss.item()
    with torch.no_grad():
        return losses, loss_of(batches.validation(0)).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [
        (SWITCHING, {**ranges_of([2, 2, 1], [1, 1, 4]), "optimizer_strategy": [1, 2, 2]}, (2, 4)),
        (
            ranges_of([2, 1, 1], [1, 1, 2], optimizer_strategy={"ranks": [1]}),
            {"static": {"tp": 2, "shares": [1, 0]}},
            (2, 2),
        ),
    ],
)
def test_a_run_resumed_under_other_strategies_equals_undivided_training(run_ranks, tmp_path, before, after, ranks):
    half = config_of(tmp_path, before, training={"steps": 4}, output={"save_every": 3, "keep": 1})
    whole = config_of(tmp_path, after, output={"save_every": 3, "keep": 1})
    run_ranks(lambda rank, group: trained(half, group), ranks[0])
    summaries = run_ranks(lambda rank, group: trained(whole, group, resume=True), ranks[1])
    losses, validation_loss = undivided(whole)
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    assert {line["step"]: line["loss"] for line in lines} == pytest.approx(losses, rel=1e-10, abs=0.0)
    assert [one["validation_loss"] for one in summaries] == pytest.approx([validation_loss] * ranks[1], rel=1e-10)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000006"]
    first = lines[0]
    assert sum(one["tokens"] for one in first["ranges"]) == 120 and len(first["ranges"]) == 2
    assert sum(one["seconds"] for one in first["ranges"]) + first["switch_s"] <= first["step_s"]


@pytest.mark.slow
def test_a_line_tells_the_mean_of_all_its_steps_also_of_those_before_a_resume(run_ranks, tmp_path):
    """The checkpoint is of step 3, and lines are of steps 2, 4 and 6."""
    output = {"save_every": 3}
    whole = config_of(tmp_path / "whole", training={"log_every": 2}, output=output)
    half, rest = (
        config_of(tmp_path / "resumed", training={"log_every": 2, "steps": steps}, output=output) for steps in (4, 6)
    )
    run_ranks(lambda rank, group: (trained(whole, group), trained(half, group), trained(rest, group, resume=True)), 2)
    expected, resumed = (read_json_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "resumed"))
    assert [line["step"] for line in resumed] == [2, 4, 6]
    for line, of_whole in zip(resumed, expected, strict=True):
        assert line["loss"] == pytest.approx(of_whole["loss"], rel=1e-10)
        for of_range, other in zip(line["ranges"], of_whole["ranges"], strict=True):
            assert of_range | {"seconds": 0.0} == other | {"seconds": 0.0}


def test_mixed_precision_and_overlap_are_keys_and_losses_are_those_of_one_strategy(run_ranks, tmp_path):
    types = {"dtype": "float32", "compute_dtype": "bfloat16"}
    runs = {
        "switched": config_of(tmp_path / "switched", {**SWITCHING, "overlap": True}, training=types),
        "both": config_of(tmp_path / "both", SWITCHING, training={**types, "gradient_dtype": "bfloat16"}),
        "static": config_of(tmp_path / "static", {"static": [2, 1, 1]}, training=types),
    }

    def train_all(rank, group):
        model = prepare(runs["switched"], documents_of(), group, resume=False)
        with model.held:
            dtypes = {one.dtype for layer in model.model.stage_layers.values() for one in layer.parameters()}
            masters = {one.dtype for one in model.model.parameters()}
            losses = {"switched": train(model)["loss"]}
        losses |= {name: trained(runs[name], group)["loss"] for name in ("both", "static")}
        return losses, dtypes, masters

    losses, dtypes, masters = run_ranks(train_all, 2)[0]
    assert dtypes == {torch.bfloat16} and masters == {torch.float32}
    for name in ("switched", "both"):
        assert losses[name] == pytest.approx(losses["static"], rel=2**-8)  # bfloat16's precision


def test_a_dry_run_counts_copies_that_compute_beside_what_the_optimizer_steps(tmp_path):
    config, mixed = (
        config_of(tmp_path, training={"dtype": "float32", "compute_dtype": dtype}) for dtype in (None, "bfloat16")
    )
    plain, other = (rank_needs(one, Strategy(2), Strategy(tp=2), 2)[0] for one in (config, mixed))
    of_optimizer = rank_needs(config, Strategy(tp=2), Strategy(tp=2), 2)[0].weights
    assert other.weights == plain.weights // 2 + of_optimizer
    assert (other.gradients, other.optimizer) == (plain.gradients, plain.optimizer)
    assert other.activations < plain.activations


def test_a_search_in_mixed_precision_measures_and_trains_in_16_bits(run_ranks, tmp_path):
    types = {"steps": 1, "dtype": "float32", "compute_dtype": "bfloat16"}
    config = config_of(tmp_path, {"search": True, "max_ranges": 2}, training=types)
    first, second = run_ranks(lambda rank, group: trained(config, group)["loss"], 2)
    assert first == second


def test_a_search_finds_what_it_trains_under(run_ranks, tmp_path, capfd):
    config = config_of(tmp_path, {"search": True, "max_ranges": 2}, training={"steps": 2}, output={"progress": True})

    def searched(rank, group):
        run = prepare(config, documents_of(), group, resume=False)
        with run.held:
            return run.choice, train(run)["loss"]

    (choice, loss), (other, _) = run_ranks(searched, 2)
    assert choice == other and choice.ranges[-1].up_to == 24 and choice.result.speedup >= 1.0
    assert loss == pytest.approx(undivided(config)[0][2], rel=1e-10)
    said = capfd.readouterr().out
    assert said.count("search: measuring 4 layers under tp = 1, 2") == 1 and "comparing 3 strategies" in said


def test_what_does_not_go_on_is_refused_on_all_ranks(run_ranks, tmp_path):
    saved = config_of(tmp_path, training={"steps": 1}, output={"save_every": 1})
    other = config_of(tmp_path, training={"dtype": "float32"})

    def check(rank, group):
        trained(saved, group)
        said = []
        for config, resume in ((saved, False), (other, True), (config_of(tmp_path, {"static": [1, 4, 1]}), True)):
            with pytest.raises(ValueError) as refused:
                prepare(config, documents_of(), group, resume=resume)
            said.append(str(refused.value))
        return said

    for earlier, differs, ranks in run_ranks(check, 2):
        assert "holds an earlier run: add --resume" in earlier and "is of another layout (dtype differ)" in differs
        assert "strategies: strategy (1, 4, 1) needs rank 3: there are 2 ranks" in ranks


@pytest.mark.parametrize("name", READER.available())
def test_every_configuration_that_comes_along_is_whole(name):
    config = load_config(name)
    config.validate_ranks(2 if "two" in name else 4)
    assert READER.from_dict(json.loads(json.dumps(READER.to_dict(config)))) == config


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"strategies": {}}, "one of ranges, static and search: true is needed, found none of them"),
        ({"strategies": {**SWITCHING, "static": [1, 1, 1]}}, "is needed, found ranges and static"),
        ({"strategies": {"ranges": 3}}, "strategies.ranges=3: a list of ranges is needed"),
        (
            {"strategies": {"ranges": [{"up_to": 24}]}},
            "strategies.ranges: length range {'up_to': 24}: ['strategy'] are",
        ),
        ({"strategies": ranges_of([1, 1], [1, 2, 1])}, "strategies.ranges: strategy [1, 1]: [dp, tp, pp] is needed"),
        ({"strategies": {"static": [1, 0, 1]}}, "strategies.static: strategy tp=0 is not allowed"),
        ({"strategies": {"statik": [1, 1, 1]}}, "unknown strategies key 'statik' (did you mean 'static'?)"),
        ({"data": {"max_length": 25}}, "strategies.ranges end at up_to=24: sequences have up to data.max_length=25"),
        ({"training": {"compute_dtype": "float16"}}, "training.compute_dtype='float16' is not allowed"),
        ({"strategies": {**SWITCHING, "overlap": 1}}, "strategies.overlap=1"),
        ({"training": {"max_tokens": 23}}, "training.max_tokens=23 is not allowed: a micro-batch must have room"),
        ({"training": {"token": 1}}, "unknown training key 'token' (did you mean 'tokens'?)"),
    ],
)
def test_mistakes_are_named_with_what_is_allowed(tmp_path, sections, message):
    with pytest.raises(ValueError) as refused:
        config_of(tmp_path, **sections)
    assert message in str(refused.value)


def test_a_choice_on_the_command_line_takes_the_place_of_the_files():
    for given, key in (("search=true", "search"), ("static=[1, 2, 1]", "static")):
        strategies = load_config("switching_two_ranks", [f"strategies.{given}"]).strategies
        assert getattr(strategies, key) and strategies.ranges is None and strategies.optimizer_strategy is None
    strategies = load_config(
        "switching_two_ranks", ["strategies.optimizer_strategy=[2, 1, 1]", "strategies.static=[1, 2, 1]"]
    ).strategies
    assert strategies.optimizer_strategy == Strategy(2) and strategies.static == Strategy(tp=2)
    with pytest.raises(ValueError, match=r"found static and search; on the command line --set strategies.search=true"):
        load_config("switching_two_ranks", ["strategies.search=true", "strategies.static=[1, 2, 1]"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=nothing"], "--config nothing: no such file; by bare name there are ['switching', "),
        (["--dry-run", "--ranks=3"], "strategies: strategy (4, 1, 1) needs rank 3: there are 3 ranks"),
        (["--dry-run", "--set=model.mlp_size=6"], "the 6 units of layers.1.mlp.gate_up.weight do not divide by tp=4"),
        (["--dry-run", "--set=strategies.memory_limit=1e6"], "rank 0 needs "),
        ([], "start it with `torchrun --nproc-per-node 2 -m lm_examples.train_strategies"),
    ],
)
@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_a_mistake_ends_the_program_with_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, f"--data={ROOT / 'lm_examples'}"])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and message in said and said.count("\n") == 1


def test_a_dry_run_tells_what_every_rank_needs_under_each_strategy():
    arguments = ["--config=switching_two_ranks", f"--data={ROOT / 'lm_examples'}"]
    config = READER.from_arguments(READER.argument_parser().parse_args(arguments))
    console = Console(record=True, width=160)
    needs = dry_run(config, num_ranks=2, console=console)
    whole = sum(one.num_bytes for one in config.tensors())
    data_parallel, optimizer_strategy = needs[Strategy(2)], needs[Strategy(tp=2)]
    assert [one.weights for one in data_parallel] == [whole] * 2
    assert (
        0.5 * whole < optimizer_strategy[0].weights < 0.6 * whole
        and optimizer_strategy[0].gradients == optimizer_strategy[0].weights
    )
    assert (
        data_parallel[0].gradients == whole + optimizer_strategy[0].weights
        and data_parallel[0].optimizer == 2 * optimizer_strategy[0].weights
    )
    assert optimizer_strategy[0].activations < data_parallel[0].activations
    # In a switch both sets of weights, gradients at both ends, AdamW's state and messages.
    least = 2 * whole + (1 + 1 + 2) * optimizer_strategy[0].weights
    assert (
        least < data_parallel[0].switch <= data_parallel[0].total
        and optimizer_strategy[0].switch == data_parallel[0].switch
    )
    said = console.export_text()
    assert said.count("0 to 1") == 2
    assert "257 to 1024" in said and "embedding, blocks 0 to 3, head" in said and "(1, 2, 1)" in said


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_activations_are_estimated_as_autograd_keeps_them(num_kv_heads):
    config = load_config("switching", [f"model.num_kv_heads={num_kv_heads}"])
    layers = llama_layers(config.model)
    weights = {one.untyped_storage().data_ptr() for layer in layers for one in layer.parameters()}
    packed = Packed.of([torch.randint(0, 256, (257,))])
    x = packed.tokens
    for number, layer in enumerate(layers):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one, kept=kept: kept.append(one) or one, lambda one: one):
            x = layer(x.detach().requires_grad_(number > 0), packed)
            loss = token_loss(x, packed) if number == len(layers) - 1 else x
        memories = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}
        held = sum(size for memory, size in memories.items() if memory not in weights)
        assert loss is not None and held / 256 == pytest.approx(token_bytes(config, number), rel=0.05)


@pytest.mark.slow
def test_the_program_trains_and_resumes_under_one_strategy(tmp_path):
    small = [
        "--set=model={num_blocks: 2, hidden_size: 16, num_heads: 2, mlp_size: 16}",
        f"--data={ROOT / 'lm_examples'}",
    ]
    output = tmp_path / "run"
    command = ["--config=switching_two_ranks", f"--output={output}", *small]
    static = "--set=strategies={static: [1, 1, 2]}"
    said = ""
    for arguments in (["--steps=2", "--set=output.save_every=2"], ["--steps=3", "--resume", static]):
        ended = forked_training([*command, *arguments], tmp_path / arguments[0], main=main)
        assert ended.returncode == 0, ended.stderr
        said += ended.stdout
    assert "step 3: loss" in said and "validation loss" in said and "2 strategies" in said and "one strategy" in said
    assert [line["step"] for line in read_json_lines(output / "metrics.jsonl")] == [1, 2, 3]
