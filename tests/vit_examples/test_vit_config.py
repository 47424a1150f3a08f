"""Configurations of training runs: files, overrides, and what is refused."""

from __future__ import annotations

import json

import pytest

from vit_examples.config import READER, ModelConfig, RunConfig, StragglerConfig, TrainingConfig, load_config
from vit_examples.harness.config_reader import plain
from zeroresize.config import BalanceConfig


def test_every_shipped_configuration_is_sound_on_two_and_eight_ranks() -> None:
    for name in READER.names:
        config = load_config(name)
        assert plain(READER.from_dict(plain(config))) == plain(config) and json.dumps(plain(config))
        assert config.model.num_tokens == 65  # the paper's
        config.validate_group_size(8 if name in ("vit_1b", "vit_3b") else 2)


def test_flags_and_overrides_change_the_file_in_that_order() -> None:
    words = "--config demo --host torch --mode zero-rd --epochs 7 --seed 3 --set training.lr=3e-4 --set training.seed=5"
    arguments = READER.argument_parser().parse_args([*words.split(), "--set", "straggler={kind: sleep, chi: {1: 4}}"])
    config = READER.from_arguments(arguments)
    assert (config.host, config.balance.mode, config.training.epochs) == ("torch", "zero-rd", 7)
    assert (config.training.lr, config.training.seed, config.balance.seed) == (3e-4, 5, 3)
    assert config.straggler.chi == {1: 4}
    named = READER.from_arguments(READER.argument_parser().parse_args(["--output=2024", "--data=a: b # c"]))
    assert (named.output.folder, named.data.source) == ("2024", "a: b # c")  # text, whatever it looks like


def test_yaml_is_read_as_people_mean_it(tmp_path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("balance: {mode: off}\ntraining: {lr: 1e-3, weight_decay: 0}\nmodel: {mlp_size: null}\n")
    config = load_config(path)
    assert (config.balance.mode, config.training.lr) == ("off", 1e-3)
    assert config.model.mlp_size == 4 * config.model.hidden_size


MISTAKES = {
    "training.learning_rate=1": r"unknown training key 'learning_rate': allowed are .*'lr'",
    "balanse.mode=off": r"unknown section 'balanse' \(did you mean 'balance'\?\): allowed are .*'training'",
    "training.lr=fast": "training.lr='fast'.*a finite number above 0",
    "training.epochs=0": "training.epochs=0.*at least 1",
    "training.accumulation=3": "training.batch_size=64 is not divisible by training.accumulation=3",
    "training.precision=fp8": "'fp32', 'bf16', 'fp16'",
    "training=5": "expected a mapping of training keys, found int",
    "model.num_heads=7": "model.hidden_size=192 is not divisible by model.num_heads=7",
    "balance.mode=fast": r"balance\.mode='fast'.*zero-rd",
    "host=jax": r"host='jax'.*\['colossalai', 'torch'\]",
    "straggler.kind=sleep": "straggler.chi is empty",
    "straggler.chi={1: 4.0}": r"nobody would be slow; set straggler\.kind to one of .*'sleep'.*leave chi empty",
    "straggler.chi=4": "schedule 'static' needs a mapping",
    "straggler.pin_ratio=1.0": "straggler.pin_ratio=1.0.*below 1",
    "data.augment=1": "data.augment=1.*true or false",
    "training.lr": "expected section.key=value",
    "balance.paper.alpha=1.5": r"balance\.paper\.alpha=1.5 is not allowed",
    "training.batch_size=3000000000": "2147483647 is the largest",
    "timeout_s=1e300": r"timeout_s=1e\+300 is not allowed: a finite number .*at most 1e\+06",
}


def test_a_wrong_key_or_value_is_named_with_what_is_allowed() -> None:
    for override, message in MISTAKES.items():
        with pytest.raises(ValueError, match=message):
            load_config("demo", [override])


def test_a_wrong_argument_or_file_is_named(tmp_path) -> None:
    for words, message in {
        "--epochs=x": "argument --epochs: invalid int value: 'x'",
        "--epoch=3": "unrecognized arguments: --epoch=3",  # no flag is guessed from its beginning
        "--ranks=2": "--ranks goes with --dry-run",
    }.items():
        with pytest.raises(ValueError, match=message):
            READER.from_arguments(READER.argument_parser().parse_args(words.split()))
    path = tmp_path / "own.yaml"
    for content, message in {
        b"model: {depth: \xff}": "own.yaml: cannot be read as YAML",
        b"training: {lr: 1}\ntraining: {lr: 2}": "own.yaml: cannot be read as YAML: line 2",
        b"": "expected sections, found None",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_config(path)
    with pytest.raises(ValueError, match=r"--config nowhere: no such file.*'vit_1b'"):
        load_config("nowhere")


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "message"),
    [
        ([], 5, "model.num_heads=12 is not divisible by the 5 tensor-parallel ranks"),
        (["straggler={kind: sleep, chi: {2: 4.0}}"], 2, "rank 2 is not one of the group's 2"),
        (["straggler.kind=contend", "straggler.chi={1: 2.5}"], 2, "whole number"),
        (["balance.mode=zero-rd", "balance.ratio=0.5", "balance.ranks=[3]"], 2, r"balance\.ranks=\[3\] names \[3\]"),
    ],
)
def test_what_the_ranks_cannot_run_is_refused(overrides: list[str], num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config("demo", overrides).validate_group_size(num_ranks)


def test_a_pin_that_the_balancer_would_refuse_is_refused_before_training() -> None:
    for balance, message in (
        ({"mode": "mig"}, "mode='mig' cannot pin"),
        ({"mode": "zero-pridiff", "max_ratio": 0.4}, "exceeds max_ratio"),
    ):
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
    assert RunConfig().training == TrainingConfig()
