"""Configurations of language models: what comes along, what is refused, and with which words; dry runs."""

import json
from pathlib import Path

import pytest
import torch

from lm_examples.config import READER, load_config
from lm_examples.llama import token_loss
from lm_examples.pipeline_config import RunConfig
from lm_examples.switching.feed import needs_of
from lm_examples.train import main
from vit_examples.harness.config_reader import plain
from zeroresize.plan.strategy import Strategy
from zeroresize.strategy.packed import Packed

SOURCES = Path(__file__).resolve().parents[2] / "lm_examples"


def test_every_configuration_that_comes_along_is_whole():
    for name in READER.names:
        config = load_config(name)
        config.validate_ranks(4 if name == "switching" else 2)
        assert READER.from_dict(json.loads(json.dumps(plain(config)))) == config


STRATEGIES = {"feed": "strategies"}
MISTAKES = [
    ({"modle": {}}, "unknown section 'modle' (did you mean 'model'?)"),
    ({"feed": "rows"}, "feed='rows' is not allowed"),
    ({"training": {"step": 3}}, "unknown training key 'step' (did you mean 'steps'?)"),
    ({"model": []}, "expected a mapping of model keys, found list"),
    ({"model": {"vocabulary": 200}}, "model.vocabulary=200 is not allowed"),
    ({"training": {"batch_size": 6, "micro_batches": 4}}, "is not divisible by training.micro_batches=4"),
    ({"training": {"lr": 0}}, "training.lr=0 is not allowed"),
    ({"pipeline": {"boundaries": "even"}}, "pipeline.boundaries='even' is not allowed: choose one of"),
    ({"balance": {"memory_limits": [5, -1]}}, "balance.memory_limits=-1 is not allowed"),
    ({"straggler": {"from_step": 5, "to_step": 5}}, "straggler.to_step=5 is not allowed"),
    ({"case": {"name": "pruned"}}, "case.name='pruned' is not allowed (did you mean 'pruning'?)"),
    ({"case": {"nmae": "none"}}, "unknown key of case 'none' 'nmae' (did you mean 'name'?)"),
    ({"case": "none"}, "case='none': expected a mapping such as {name: pruning}"),
    ({"output": {"keep": 0}}, "output.keep=0 is not allowed"),
    ({"repack": {"mode": "on"}}, "needs balance.memory_limits or repack.max_slowdown"),
    ({"repack": {"mode": "on", "max_slowdown": 1.0}, "balance": {"mode": "off"}}, "goes with balance.mode=on"),
    ({**STRATEGIES, "strategies": {}}, "one of ranges, static and search: true is needed, found none of them"),
    ({**STRATEGIES, "strategies": {"static": [1, 0, 1]}}, "strategies.static: strategy tp=0 is not allowed"),
    ({**STRATEGIES, "training": {"max_tokens": 23}}, "training.max_tokens=23 is not allowed: a micro-batch must have"),
    ({"feed": "microbatches", "model": {"kind": "bert"}}, "model.kind='bert' is not allowed"),
    (
        {"feed": "microbatches", "microbatches": {"method": "x"}},
        "microbatches.method='x' is not allowed: ",
    ),
    ({"feed": "microbatches", "model": {"hidden_size": 10}}, "model.hidden_size=10 is not divisible"),
    ({"feed": "microbatches", "model": {"head_size": 3}}, "rotary positions need an even number"),
    ({**STRATEGIES, "model": {"num_heads": 3}}, "model.hidden_size=128 is not divisible"),
    ({**STRATEGIES, "model": {"num_kv_heads": 3}}, "model.num_heads=4 is not divisible"),
    ({**STRATEGIES, "model": {"num_heads": 128}}, "heads of 1 features: rotary positions need an even number"),
    ({**STRATEGIES, "model": {"rotary_base": 0.5}}, "model.rotary_base=0.5 is not allowed"),
    ({**STRATEGIES, "data": {"lengths": "pages"}}, "data.lengths='pages' is not allowed: choose one of"),
    ({**STRATEGIES, "data": {"max_length": 0}}, "data.max_length=0 is not allowed"),
]


def test_mistakes_are_named_with_what_is_allowed():
    for values, message in MISTAKES:
        with pytest.raises(ValueError) as refused:
            READER.from_dict(values)
        assert message in str(refused.value)


@pytest.mark.parametrize(
    ("values", "num_ranks", "message"),
    [
        ({"model": {"num_blocks": 1}}, 4, "model.num_blocks=1 makes 3 layers, embedding and head included: 4 stages"),
        ({"pipeline": {"boundaries": [0, 4, 9]}}, 2, "pipeline.boundaries: boundaries [0, 4, 9] do not divide 10"),
        ({"balance": {"memory_limits": [1e9]}}, 2, "balance.memory_limits are 1, not one of each of 2 stages"),
        ({"straggler": {"rank": 2}}, 2, "straggler.rank=2 is not allowed: 1 is the largest"),
        ({**STRATEGIES, "strategies": {"static": [4, 1, 1]}}, 3, "strategies: strategy (4, 1, 1) needs rank 3"),
        ({"feed": "microbatches"}, 3, "parallel: dp × tp × pp = 2 ranks are needed, and there are 3"),
    ],
)
def test_what_so_many_ranks_cannot_run_is_refused(values, num_ranks, message):
    with pytest.raises(ValueError) as refused:
        READER.from_dict(values).validate_ranks(num_ranks)
    assert message in str(refused.value)


def test_a_straggler_is_slow_from_its_first_step_until_before_its_last():
    straggler = READER.from_dict({"straggler": {"rank": 1, "chi": 3, "from_step": 2, "to_step": 4}}).straggler
    assert [straggler.chi_of(step, 1) for step in (1, 2, 3, 4)] == [1, 3, 3, 1]
    assert straggler.chi_of(2, 0) == 1 and RunConfig().straggler.chi_of(1, 0) == 1


def test_flags_and_sets_change_the_file():
    arguments = ["--config=small", "--steps=7", "--mode=off", "--set=pipeline.boundaries=[0, 3, 10]", "--seed=5"]
    config = READER.from_arguments(READER.argument_parser().parse_args([*arguments, "--set=model={num_blocks: 4}"]))
    assert (config.training.steps, config.balance.mode, config.training.seed) == (7, "off", 5)
    assert config.pipeline.boundaries == (0, 3, 10) and config.model.num_blocks == 4
    assert config.model.hidden_size == RunConfig().model.hidden_size  # the section was replaced as a whole


def test_a_choice_on_the_command_line_takes_the_place_of_the_files():
    for given, key in (("search=true", "search"), ("static=[1, 2, 1]", "static")):
        strategies = load_config("switching_two_ranks", [f"strategies.{given}"]).strategies
        assert getattr(strategies, key) and strategies.ranges is None and strategies.optimizer_strategy is None
    case = load_config("pruning", ["case.name=freezing", "case.every=3"]).case
    assert case.name == "freezing" and case.every == 3 and case.start == 0
    assert load_config("pruning", ["case.name=pruning"]).case.start == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=nothing"], "--config nothing: no such file; by bare name there are ["),
        (["--set=training.stps=3"], "unknown training key 'stps' (did you mean 'steps'?)"),
        (["--set=steps"], "--set steps: expected section.key=value"),
        (["--ranks=2"], "--ranks goes with --dry-run"),
        (["--dry-run", "--ranks=0"], "--ranks 0: at least 1 is needed"),
        (["--config=switching", "--dry-run", "--ranks=4", "--set=strategies.memory_limit=1e6"], "rank 0 needs "),
        (["--frobnicate"], "unrecognized arguments: --frobnicate (--help lists all arguments)"),
        ([], "start it with `torchrun --nproc-per-node 2 -m lm_examples.train`"),
    ],
)
def test_a_mistake_ends_the_program_with_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, f"--data={SOURCES}"])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and message in said and said.count("\n") == 1


def test_a_dry_run_tells_what_every_rank_needs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # readline sets it, too
    for config, texts in (
        ("small", ("case none, 1f1b", "embedding, blocks 0 to 3", "834,048")),
        ("switching_two_ranks", ("(2, 1, 1)", "(1, 2, 1)", "embedding, blocks 0 to 3, head")),
        ("gpt", ("mini-batch 0: ", "padding if all were as long")),
    ):
        main(["--config", config, "--dry-run", f"--data={SOURCES}", "--set=data.max_bytes=300000"])
        said = capsys.readouterr().out
        assert all(text in said for text in texts), said


def test_what_ranks_need_follows_from_their_strategy():
    config = load_config("switching_two_ranks")
    needs = needs_of(config, 2)
    whole = sum(one.num_bytes for one in config.tensors())
    data_parallel, tensor_parallel = needs[Strategy(2)][0], needs[Strategy(tp=2)][0]
    assert data_parallel.weights == whole and 0.5 * whole < tensor_parallel.weights < 0.6 * whole
    assert data_parallel.gradients == whole + tensor_parallel.weights
    assert data_parallel.optimizer == tensor_parallel.optimizer == 2 * tensor_parallel.weights


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_activations_are_estimated_as_autograd_keeps_them(num_kv_heads):
    config = load_config("switching", [f"model.num_kv_heads={num_kv_heads}"])
    layers = config.layers()
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
        assert loss is not None and held / 256 == pytest.approx(config.token_bytes(number), rel=0.05)
