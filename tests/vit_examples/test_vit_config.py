"""Configurations of training runs: files, overrides, and what is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("yaml")

from vit_examples.config import LARGEST_SIZES, ModelConfig, RunConfig, StragglerConfig, TrainingConfig
from vit_examples.config_file import READER, load_config
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import MODES


@pytest.mark.parametrize("name", READER.available())
def test_every_shipped_configuration_is_sound_on_two_and_eight_ranks(name: str) -> None:
    config = load_config(name)
    assert READER.from_dict(READER.to_dict(config)) == config
    assert config.model.num_tokens == 65  # the paper's
    config.validate_group_size(2)
    if name in ("vit_1b", "vit_3b"):
        config.validate_group_size(8)


def test_flags_and_overrides_change_the_file_in_that_order() -> None:
    words = "--config demo --host torch --mode zero-rd --epochs 7 --seed 3 --set training.lr=3e-4 --set training.seed=5"
    arguments = READER.argument_parser().parse_args([*words.split(), "--set", "straggler={kind: sleep, chi: {1: 4}}"])
    config = READER.from_arguments(arguments)
    assert (config.host, config.balance.mode, config.training.epochs) == ("torch", "zero-rd", 7)
    assert (config.training.lr, config.training.seed, config.balance.seed) == (3e-4, 5, 3)
    assert config.straggler.chi == {1: 4}


def test_yaml_is_read_as_people_mean_it(tmp_path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("balance: {mode: off}\ntraining: {lr: 1e-3, weight_decay: 0}\nmodel: {mlp_size: null}\n")
    config = load_config(path)
    assert config.balance.mode == "off"
    assert config.training.lr == 1e-3
    assert config.model.mlp_size == 4 * config.model.hidden_size


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.learning_rate=1", r"unknown training key 'learning_rate': allowed are .*'lr'"),
        ("training.batchsize=1", r"unknown training key 'batchsize' \(did you mean 'batch_size'\?\): allowed are"),
        ("balanse.mode=off", r"unknown section 'balanse' \(did you mean 'balance'\?\): allowed are .*'training'"),
        ("training.lr=fast", "training.lr='fast'.*a finite number above 0"),
        ("training.lr=.inf", "training.lr=inf.*a finite number above 0"),
        ("training.lr=-1", "training.lr=-1.*above 0"),
        ("training.epochs=0", "training.epochs=0.*at least 1"),
        ("training.epochs=1.5", "training.epochs=1.5.*whole number"),
        ("training.accumulation=3", "training.batch_size=64 is not divisible by training.accumulation=3"),
        ("training.precision=fp8", "'fp32', 'bf16', 'fp16'"),
        ("training=5", "expected a mapping of training keys, found int"),
        ("model.num_heads=7", "model.hidden_size=192 is not divisible by model.num_heads=7"),
        ("balance.mode=fast", r"balance\.mode='fast'.*zero-rd"),
        ("balance.ratio=1.5", r"balance\.ratio=1.5 is not allowed"),
        ("host=jax", r"host='jax'.*\['colossalai', 'torch'\]"),
        ("straggler.kind=slow", "straggler.kind='slow'.*'sleep'"),
        ("straggler.kind=sleep", "straggler.chi is empty"),
        (
            "straggler.chi={1: 4.0}",
            r"nobody would be slow; set straggler\.kind to one of .*'sleep'.*leave chi empty",
        ),
        ("straggler={schedule: round_robin, chi: 2.0}", "nobody would be slow"),
        ("straggler={kind: sleep, chi: {0:2, 1:4.0}}", r"write \{0: 2, 1: 4\.0\}, with a space"),
        ("straggler.chi=4", "schedule 'static' needs a mapping"),
        ("straggler.pin_ratio=1.0", "straggler.pin_ratio=1.0.*below 1"),
        ("data.train_size=0", "data.train_size=0"),
        ("data.augment=1", "data.augment=1.*true or false"),
        ("training.lr", "expected section.key=value"),
        ("lr=1", r"--set lr: name the section: training\.lr"),
        ("alpha=1", r"name the section: balance\.paper\.alpha"),
        ("balance.paper.alpha=1.5", r"balance\.paper\.alpha=1.5 is not allowed"),
        ("balance.paper.alpah=1", r"unknown balance key 'paper\.alpah' \(did you mean 'paper\.alpha'\?\)"),
        ("balance.alpha=1", r"unknown balance key 'alpha' \(did you mean 'paper\.alpha'\?\)"),
        ("balance.paper=3", "expected a mapping of paper keys, found int"),
        ("seed=1", r"name the section: training\.seed or balance\.seed"),
        ("training.lr=[1", r"--set training\.lr=\[1: the value cannot be read as YAML: line 1"),
        ("straggler={chi: 1, chi: 2}", "the key 'chi' is in line 1 already"),
        ("training=", "expected a mapping of training keys, found nothing"),
        ("model.depth=10001", "model.depth=10001 is not allowed: 10000 is the largest"),
        ("model.hidden_size=9223372036854775807", "model.hidden_size=.*131072 is the largest"),
        ("training.batch_size=3000000000", "2147483647 is the largest"),
        ("training.seed=1e999", "training.seed=inf is not allowed: a whole number"),
        ("training.lr=1e999", "training.lr=inf is not allowed: a finite number"),
        ("training.epochs=" + "9" * 5000, "a number of more than 64 bits"),
        ("data.source='${a b'", r"data\.source: token recognition error"),
        ("timeout_s=1e300", r"timeout_s=1e\+300 is not allowed: a finite number .*at most 1e\+06"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_allowed(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config("demo", [override])


def test_only_a_files_own_mistakes_are_blamed_on_it(tmp_path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("training: {lr: fast}\n")
    with pytest.raises(ValueError, match=r"^own\.yaml: training\.lr='fast'"):
        load_config(path, ["training.seed=1"])
    assert load_config(path, ["training.lr=0.1"]).training.lr == 0.1
    with pytest.raises(ValueError, match=r"^training\.lr=-1"):
        load_config(path, ["training.lr=-1"])


def test_variables_of_the_environment_stay_for_whoever_opens_the_data() -> None:
    assert load_config("demo", ["data.source=${NO_SUCH_VARIABLE}/x"]).data.source == "${NO_SUCH_VARIABLE}/x"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--epochs=x", "argument --epochs: invalid int value: 'x'"),
        ("--epoch=3", "unrecognized arguments: --epoch=3"),  # no flag is guessed from its beginning
        ("--host=jax", "argument --host: invalid choice: 'jax'"),
        ("--ranks=2", "--ranks goes with --dry-run"),
        ("train.py", "unrecognized arguments: train.py"),
    ],
)
def test_a_wrong_argument_is_named(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        READER.from_arguments(READER.argument_parser().parse_args(words.split()))


def test_what_flags_name_is_text_whatever_it_looks_like() -> None:
    arguments = READER.argument_parser().parse_args(["--output=2024", "--data=a: b # c"])
    config = READER.from_arguments(arguments)
    assert (config.output.folder, config.data.source) == ("2024", "a: b # c")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model: {depth: \xff}", "own.yaml: cannot be read as YAML"),
        (b"training: {lr: 1}\ntraining: {lr: 2}", "own.yaml: cannot be read as YAML: line 2"),
        (b"", "own.yaml: expected a mapping of sections, found nothing"),
        (b"training: {lr: 1e999}", "own.yaml: training.lr=inf"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, content: bytes, message: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_config(path)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", ".", ""])
def test_what_is_no_file_at_all_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"--config .*by bare name there are"):
        load_config(name)


def test_the_bytes_of_the_largest_model_fit_into_64_bits() -> None:
    depth, hidden, mlp = (LARGEST_SIZES[key] for key in ("depth", "hidden_size", "mlp_size"))
    parameters = depth * (4 * hidden**2 + 2 * hidden * mlp)
    assert 16 * parameters < 2**63


def test_help_names_modes_and_sections() -> None:
    shown = "".join(READER.argument_parser().format_help().split())  # without the line breaks that argparse adds
    assert f"oneof{','.join(MODES)}" in shown
    assert f"Sections:{','.join(READER.sections)}." in shown
    assert "zeroresize/config/balance.pyandpaper.py" in shown


def test_a_missing_file_is_named_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"--config nowhere: no such file.*'vit_1b'"):
        load_config("nowhere")


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "message"),
    [
        ([], 5, "model.num_heads=12 is not divisible by the 5 tensor-parallel ranks"),
        (["model.mlp_size=770"], 4, "model.mlp_size=770 is not divisible by the 4"),
        (["straggler={kind: sleep, chi: {2: 4.0}}"], 2, "rank 2 is not one of the group's 2"),
        (["straggler={kind: sleep, chi: {1: 0.5}}"], 2, "straggler.chi={1: 0.5}"),
        (["straggler.kind=contend", "straggler.chi={1: 2.5}"], 2, "whole number"),
        (["balance.mode=zero-rd", "balance.ratio=0.5", "balance.ranks=[3]"], 2, r"balance\.ranks=\[3\] names \[3\]"),
    ],
)
def test_what_the_ranks_cannot_run_is_refused(overrides: list[str], num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config("demo", overrides).validate_group_size(num_ranks)


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        ({"mode": "off"}, "mode='off' cannot pin a ratio"),
        ({"mode": "mig"}, "mode='mig' cannot pin a ratio"),
        ({"mode": "semi"}, "mode='semi' cannot pin a ratio"),
        ({"mode": "zero-pridiff", "max_ratio": 0.4}, "exceeds max_ratio=0.4"),
    ],
)
def test_a_pin_that_the_balancer_would_refuse_is_refused_before_training(balance: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"straggler.pin_ratio=0.5: .*{message}"):
        RunConfig(straggler=StragglerConfig(chi={1: 2.0}, pin_ratio=0.5), balance=BalanceConfig(**balance))


def test_labels_are_padded_to_a_multiple_of_the_ranks() -> None:
    assert [ModelConfig(num_labels=10).padded_labels(ranks) for ranks in (1, 2, 4, 8)] == [10, 10, 12, 16]


def test_schedules_name_the_slow_ranks_of_an_epoch() -> None:
    assert StragglerConfig(kind="sleep", chi={1: 4.0}).chi_of(3, 8) == {1: 4.0}
    moving = StragglerConfig(kind="sleep", schedule="round_robin", chi=2)
    assert [moving.chi_of(epoch, 3) for epoch in range(4)] == [{0: 2.0}, {1: 2.0}, {2: 2.0}, {0: 2.0}]
    late = StragglerConfig(kind="sleep", chi={1: 4.0}, from_epoch=2)
    assert [late.chi_of(epoch, 8) for epoch in range(3)] == [{}, {}, {1: 4.0}]


def test_defaults_are_sound() -> None:
    assert RunConfig().training == TrainingConfig()
