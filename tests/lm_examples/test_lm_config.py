"""Configurations of the language models: what is refused, and with which words."""

import json

import pytest

from lm_examples.config import RunConfig
from lm_examples.config_file import READER, load_config
from lm_examples.train import main


@pytest.mark.parametrize("name", READER.available())
def test_every_configuration_that_comes_along_is_whole(name):
    config = load_config(name)
    config.validate_stages(2)
    config.validate_stages(4)
    assert config.case.name == {"small": "none", "repacking": "pruning"}.get(name, name)
    assert READER.from_dict(json.loads(json.dumps(READER.to_dict(config)))) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": {}}, "unknown section 'modle' (did you mean 'model'?)"),
        ({"training": {"step": 3}}, "unknown training key 'step' (did you mean 'steps'?)"),
        ({"model": []}, "expected a mapping of model keys, found list"),
        ({"model": {"vocabulary": 200}}, "model.vocabulary=200 is not allowed"),
        ({"model": {"hidden_size": 10, "num_heads": 4}}, "model.hidden_size=10 is not divisible by model.num_heads=4"),
        ({"training": {"batch_size": 6, "micro_batches": 4}}, "is not divisible by training.micro_batches=4"),
        ({"training": {"dtype": "int8"}}, "training.dtype='int8' is not allowed: choose one of"),
        ({"training": {"lr": 0}}, "training.lr=0 is not allowed"),
        ({"pipeline": {"schedule": "zb"}}, "pipeline.schedule='zb' is not allowed"),
        ({"pipeline": {"boundaries": "even"}}, "pipeline.boundaries='even' is not allowed: choose one of"),
        ({"pipeline": {"boundaries": [0, "a"]}}, "pipeline.boundaries='a' is not allowed"),
        ({"balance": {"mode": "auto"}}, "balance.mode='auto' is not allowed"),
        ({"balance": {"by": "bytes"}}, "balance.by='bytes' is not allowed"),
        ({"balance": {"memory_limits": 5}}, "balance.memory_limits=5: a list of bytes is needed"),
        ({"balance": {"memory_limits": [5, -1]}}, "balance.memory_limits=-1 is not allowed"),
        ({"straggler": {"chi": 0.5}}, "straggler.chi=0.5 is not allowed"),
        ({"straggler": {"from_step": 5, "to_step": 5}}, "straggler.to_step=5 is not allowed"),
        ({"sleep": {"forward_s": -1}}, "sleep.forward_s=-1 is not allowed"),
        (
            {"case": {"name": "pruned"}},
            "case.name='pruned' is not allowed (did you mean 'pruning'?): choose one of ['none', 'pruning'",
        ),
        ({"case": {"nmae": "none"}}, "unknown key of case 'none' 'nmae' (did you mean 'name'?)"),
        ({"case": "none"}, "case='none': expected a mapping such as {name: pruning}"),
        ({"data": {"held_out": 1}}, "data.held_out=1 is not allowed"),
        ({"output": {"keep": 0}}, "output.keep=0 is not allowed"),
    ],
)
def test_mistakes_are_named_with_what_is_allowed(values, message):
    with pytest.raises(ValueError) as refused:
        READER.from_dict(values)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("values", "num_stages", "message"),
    [
        ({"model": {"num_blocks": 1}}, 4, "model.num_blocks=1 makes 3 layers, embedding and head included: 4 stages"),
        ({"pipeline": {"boundaries": [0, 4, 9]}}, 2, "pipeline.boundaries: boundaries [0, 4, 9] do not divide 10"),
        ({"balance": {"memory_limits": [1e9]}}, 2, "balance.memory_limits are 1, not one of each of 2 stages"),
        ({"straggler": {"stage": 2}}, 2, "straggler.chi={2: 2.0}: rank 2 is not one of the group's 2"),
    ],
)
def test_what_so_many_stages_cannot_run_is_refused(values, num_stages, message):
    config = READER.from_dict(values)
    with pytest.raises(ValueError) as refused:
        config.validate_stages(num_stages)
    assert message in str(refused.value)


def test_a_straggler_is_slow_from_its_first_step_until_before_its_last():
    straggler = READER.from_dict({"straggler": {"stage": 1, "chi": 3, "from_step": 2, "to_step": 4}}).straggler
    assert [straggler.chi_of(step, 1) for step in (1, 2, 3, 4)] == [1, 3, 3, 1]
    assert straggler.chi_of(2, 0) == 1 and RunConfig().straggler.chi_of(1, 0) == 1


def test_flags_and_sets_change_the_file():
    arguments = ["--config=small", "--steps=7", "--mode=off", "--set=pipeline.boundaries=[0, 3, 10]", "--seed=5"]
    config = READER.from_arguments(READER.argument_parser().parse_args([*arguments, "--set=model={num_blocks: 4}"]))
    assert (config.training.steps, config.balance.mode, config.training.seed) == (7, "off", 5)
    assert config.pipeline.boundaries == (0, 3, 10) and config.model.num_blocks == 4
    assert config.model.hidden_size == RunConfig().model.hidden_size  # the section was replaced as a whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=nothing"], "--config nothing: no such file; by bare name there are ["),
        (["--set=training.stps=3"], "unknown training key 'stps' (did you mean 'steps'?)"),
        (["--set=trainin.steps=3"], "unknown section 'trainin' (did you mean 'training'?)"),
        (["--set=steps"], "--set steps: expected section.key=value"),
        (["--ranks=2"], "--ranks goes with --dry-run"),
        (["--dry-run", "--ranks=0"], "--ranks 0: at least 1 is needed"),
        (["--dry-run", "--ranks=11"], "11 stages need at least one for each"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate (--help lists all arguments)"),
        (
            [],
            "not set: training runs on several ranks, start it with `torchrun --nproc-per-node 2 -m lm_examples.train",
        ),
    ],
)
def test_a_mistake_ends_the_program_with_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and message in said and said.count("\n") == 1


def test_a_mistake_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("training: {steps: -1}\n")
    with pytest.raises(ValueError, match=r"mine\.yaml: training\.steps=-1"):
        load_config(path)
    path.write_text("training:\nmodel: {num_blocks: 3}\n")
    assert load_config(path).model.num_blocks == 3


def test_how_often_layers_are_measured_is_chosen_by_its_cost_unless_somebody_says_so():
    for case in ("mixture_of_experts", "mixture_of_depths", "sparse_attention"):
        balance = load_config(case).balance
        assert (balance.profile_every, balance.max_measuring, balance.count_work) == ("auto", 0.01, "on")
    balance = load_config("small", ["balance.profile_every=1", "balance.max_measuring=null"]).balance
    assert (balance.profile_every, balance.max_measuring) == (1, None)
