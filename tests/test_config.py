"""The configuration: a user's mistake is named before anything runs, and nothing is lost on the way to YAML."""

import math
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from zeroresize import BalanceConfig, PaperConfig
from zeroresize.config.keys import MODES, MOVING_MODES, without_effect
from zeroresize.config.paper import nested
from zeroresize.injection.schedule import checked_chi
from zeroresize.plan.strategy import LengthRange, Strategy
from zeroresize.utils.value_checks import plain

#: A key of each kind of check, with what it does not take.
WRONG_VALUES = [
    ("mode", "zero", "['off', 'exact', 'zero-rd'"),
    ("paper.imputation", "zeros", "['zero', 'average', 'same']"),
    ("migration_transport", "units", "['broadcast-reduce', 'scatter-gather']"),
    ("ratio", 1, "0 <= ratio < 1"),
    ("ratio", math.nan, "0 <= ratio < 1"),
    ("ranks", "some", "'stragglers', 'all', or a list"),
    ("ranks", [0, -1], "'stragglers', 'all', or a list"),
    ("ranks", [1, 0, 1], "a list of different ranks"),
    ("shares", [1, -1], "none negative"),
    ("memory_limits", [0], "one number above 0 for each"),
    ("ageing", -0.1, "at least 0 is"),
    ("paper.alpha", 1.5, "at least 0 and at most 1 is"),
    ("paper.num_migrating", -1, "whole number of at least 0, or 'auto',"),
    ("tolerance", -0.1, "at least 0 and at most 10 is"),
    ("max_ratio", 1.0, "above 0 and below 1 is"),
    ("min_gain", float("inf"), "at least 0 is"),
    ("update_every", 2.0, "whole number of at least 1"),
    ("moves", 1, "true or false is needed"),
    ("seed", -1, "whole number of at least 0"),
]


@pytest.mark.parametrize(("key", "value", "allowed"), WRONG_VALUES)
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(key, value, allowed):
    with pytest.raises(ValueError) as error:
        BalanceConfig.from_dict(nested({"mode": "zero-pri", "ratio": 0.5, key: value}))

    text = str(error.value)
    assert text.startswith(f"{key}=")
    assert repr(value) in text or re.search(rf"\b{re.escape(str(value))}\b", text)
    assert allowed in text


#: Keys that do not exist or stand in the wrong room, and values beside each other that are not allowed.
MISTAKES = [
    ({"rato": 0.5, 1: 2, "mode": "zero-rd"}, "'rato' (did you mean 'ratio'?), '1': allowed are ['mode', 'ratio', "),
    ({"tolerence": 0.2}, "unknown balance key 'tolerence' (did you mean 'tolerance'?): allowed are ['mode', "),
    ({"semi_rule": "paper"}, "unknown balance key 'semi_rule' (did you mean 'paper.semi_rule'?): allowed are"),
    ({"mode": "ZERO-Pri"}, "mode='ZERO-Pri' is not allowed (did you mean 'zero-pri'?): choose one of ['off', "),
    ({"paper": {"alpah": 0.5}}, "unknown balance key 'paper.alpah' (did you mean 'paper.alpha'?): allowed are ["),
    ({"paper": {"budget": 0.5}}, "'paper.budget' (did you mean 'budget'?): allowed are ['paper.semi_rule', "),
    ({"paper": 3}, "expected a mapping of paper keys, found int: allowed are ['semi_rule', "),
    ({"paper": None}, "expected a mapping of paper keys, found nothing"),
    ({"ranks": "all"}, "ranks='all' needs a forced ratio: set ratio to a number"),
    (
        {"mode": "zero-pri", "pruned_update": "freeze", "paper": {"imputation": "average"}},
        "pruned_update='freeze' with paper.imputation='average' is not allowed",
    ),
    ({"mode": "zero-pridiff", "ratio": 0.8, "max_ratio": 0.7}, "ratio=0.8 exceeds max_ratio=0.7, the most that"),
    *(({"mode": mode, "ratio": 0.5}, f"ratio=0.5 with mode='{mode}' is not allowed: a cost") for mode in MOVING_MODES),
    ({"mode": "mig", "ranks": "all", "ratio": 0.5}, "no rank would be left"),
    ({"mode": "mig", "ratio": 10**400}, "ratio=1000"),
    ({"mode": False}, "write mode: 'off' with quotes"),
]


@pytest.mark.parametrize(("values", "message"), MISTAKES, ids=str)
def test_a_mistake_is_told_in_python_as_in_yaml(values, message):
    for build in (
        BalanceConfig.from_dict,
        lambda values: BalanceConfig().replace(**values),
        lambda values: BalanceConfig().in_mode(**{"mode": "exact", **values}),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            build(
                {str(key): value for key, value in values.items()} if build is not BalanceConfig.from_dict else values
            )


def test_numbers_of_numpy_and_torch_are_taken_and_become_plain_ones():
    given = {"mode": "zero-pri", "update_every": np.int64(5), "ratio": np.float32(0.5), "ranks": [np.int64(1)]}
    config = BalanceConfig(**given, shares=np.array([2.0, 1.0]), tolerance=torch.tensor(0.5))
    assert config == BalanceConfig(
        mode="zero-pri", update_every=5, ratio=0.5, ranks=[1], shares=(2.0, 1.0), tolerance=0.5
    )
    assert BalanceConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config
    assert Strategy(np.int64(2), torch.tensor(2), shares=np.array([2, 1])) == Strategy(2, 2, shares=(2, 1))
    assert LengthRange(np.int64(8), Strategy(), np.int64(9)) == LengthRange(8, Strategy(), 9)
    assert plain([1, (np.int64(2), "a")]) == [1, (2, "a")]
    assert checked_chi({np.int64(1): np.float64(2.0)}, 2) == {1: 2.0}


def test_ranks_must_be_of_the_group_and_leave_one_that_computes():
    config = BalanceConfig(mode="zero-pri", ratio=0.5, ranks=[0, 2, 5])
    config.validate_group_size(6)
    with pytest.raises(ValueError, match=r"ranks=\[0, 2, 5\] names \[2, 5\].* has 2 ranks: allowed are 0 to 1"):
        config.validate_group_size(2)
    with pytest.raises(ValueError, match="at least one rank must be left"):
        BalanceConfig(mode="mig", ratio=0.5, ranks=[0, 1]).validate_group_size(2)


def test_it_cannot_be_changed_but_replaced_and_is_checked_again():
    config = BalanceConfig(mode="zero-pri", seed=3)
    with pytest.raises(FrozenInstanceError):
        config.seed = 4

    assert config.replace(ratio=0.25) == BalanceConfig(mode="zero-pri", seed=3, ratio=0.25)
    with pytest.raises(ValueError, match="ratio=2"):
        config.replace(ratio=2)


def test_a_mapping_changes_some_keys_of_the_room_and_a_room_replaces_all():
    config = BalanceConfig(mode="semi", paper={"semi_rule": "paper", "num_migrating": 2})
    more = config.replace(paper={"imputation": "same"})
    assert more.paper == PaperConfig(semi_rule="paper", num_migrating=2, imputation="same")
    assert config.replace(paper=PaperConfig(imputation="same")).paper == PaperConfig(imputation="same")
    assert config.replace(tolerance=0.2).paper == config.paper
    assert more.in_mode("zero-pri") == BalanceConfig(mode="zero-pri", paper={"imputation": "same"})
    with pytest.raises(ValueError, match=r"paper\.mig_rule='paper' has no effect with mode='semi'"):
        config.in_mode("semi", paper={"mig_rule": "paper"})


#: A key of each group, where it has no effect, and where an error says that it has one.
WITHOUT_EFFECT = [
    ({"mode": "mig", "paper.imputation": "same"}, "paper.imputation='same'", "in the modes 'zero-rd', 'zero-pri'"),
    ({"mode": "zero-rd", "priority": "variation"}, "priority='variation'", "in the modes 'zero-pri', 'zero-pridiff'"),
    ({"mode": "zero-pri", "paper.snapshot": "bf16"}, "paper.snapshot='bf16'", "with priority='variation'"),
    ({"mode": "zero-pri", "paper.pridiff_rule": "paper"}, "paper.pridiff_rule='paper'", "in the modes 'zero-pridiff'"),
    ({"mode": "zero-pridiff", "paper.alpha": 0.5}, "paper.alpha=0.5", "with paper.pridiff_rule='paper'"),
    (
        {"mode": "zero-pri", "migration_transport": "scatter-gather"},
        "migration_transport='scatter-gather'",
        "in the modes 'exact', 'mig', 'semi'",
    ),
    ({"mode": "mig", "moves": False}, "moves=False", "in the modes 'exact', 'semi'"),
    ({"mode": "mig", "paper.semi_rule": "paper"}, "paper.semi_rule='paper'", "in mode 'semi'"),
    ({"mode": "zero-pri", "ratio": 0.5, "budget": 0.1}, "budget=0.1", "with ratio='auto'"),
    ({"mode": "semi", "paper.semi_rule": "paper", "budget": 0.1}, "budget=0.1", "with paper.semi_rule='makespan'"),
]


@pytest.mark.parametrize(("values", "named", "where"), WITHOUT_EFFECT, ids=lambda value: str(value))
def test_a_key_without_effect_is_refused_and_told_where_it_has_one(values, named, where):
    with pytest.raises(ValueError) as error:
        BalanceConfig(**nested(values))
    assert str(error.value).startswith(f"{named} has no effect with mode='{values['mode']}': it is used ")
    assert where in str(error.value) and "leave it at" in str(error.value)


@pytest.mark.parametrize(
    ("values", "may_move"),
    [
        ({}, True),
        ({"moves": False}, False),
        ({"mode": "semi"}, True),
        ({"mode": "semi", "budget": 0.0}, True),
        ({"mode": "semi", "moves": False}, False),
        ({"mode": "semi", "paper": {"semi_rule": "paper"}}, False),
        ({"mode": "semi", "paper": {"num_migrating": 1}}, False),
        *(({"mode": mode}, False) for mode in MODES if mode not in MOVING_MODES),
    ],
)
def test_units_move_where_our_rules_decide(values, may_move):
    assert BalanceConfig(**values).may_move is may_move


@pytest.mark.parametrize("values", [values for values, *_ in WITHOUT_EFFECT], ids=str)
def test_with_balancing_off_any_key_may_stay_as_it_is(values):
    config = BalanceConfig(**nested(values | {"mode": "off"}))
    assert config.in_mode("off") == config
    used = {key: value for key, value in values.items() if key not in without_effect(config.to_flat_dict() | values)}
    assert config.in_mode(values["mode"]) == BalanceConfig(**nested(used))


def test_a_ratio_can_be_pinned_whatever_bounds_the_ratios_that_are_decided():
    pinned = BalanceConfig(mode="zero-pri", budget=0.1, min_gain=0.5).pinned(0.5, rank=1)
    assert pinned == BalanceConfig(mode="zero-pri", ratio=0.5, ranks=(1,))


configs = st.just(BalanceConfig()) | st.builds(
    lambda mode, **values: BalanceConfig(mode="off", **values).in_mode(mode),
    mode=st.sampled_from(["off", "zero-rd", "zero-pri"]),
    ratio=st.floats(0, 1, exclude_max=True),
    ranks=st.sampled_from(["stragglers", "all"]) | st.lists(st.integers(0, 9), min_size=1, unique=True),
    target=st.sampled_from(["mean", "min"]),
    priority=st.sampled_from(["variation", "activation", "path_length"]),
    ageing=st.floats(0, 1e6),
    tolerance=st.floats(0, 10),
    max_ratio=st.floats(0, 1, exclude_min=True, exclude_max=True),
    budget=st.floats(0, 1),
    min_gain=st.floats(0, 10),
    update_every=st.integers(1, 2**31 - 1),
    block=st.integers(1, 2**31 - 1),
    iters_per_epoch=st.none() | st.integers(1, 2**31 - 1),
    seed=st.integers(0, 2**31 - 1),
    paper=st.builds(
        PaperConfig,
        imputation=st.sampled_from(["zero", "average", "same"]),
        snapshot=st.sampled_from(["host", "bf16"]),
        pridiff_rule=st.sampled_from(["budget", "paper"]),
        alpha=st.floats(0, 1),
        theta_iter=st.floats(0, 1e6),
    ),
)


@given(configs)
def test_any_configuration_survives_yaml(config):
    values = yaml.safe_load(yaml.safe_dump(config.to_dict()))
    assert BalanceConfig.from_dict(values) == BalanceConfig.from_dict(nested(config.to_flat_dict())) == config


@pytest.mark.parametrize(
    "text",
    [
        "mode: zero-rd\nratio: 0.5\nranks: [0, 2]\n",
        "balance:\n  mode: zero-rd\n  ratio: 0.5\n  ranks: [0, 2]\n  paper: {imputation: zero}\nmodel: {depth: 2}\n",
    ],
    ids=["whole file", "balance section"],
)
def test_yaml_with_and_without_a_section_of_its_own(tmp_path, text):
    (tmp_path / "balance.yaml").write_text(text)
    config = BalanceConfig.from_yaml(tmp_path / "balance.yaml")
    assert config == BalanceConfig(mode="zero-rd", ratio=0.5, ranks=(0, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping of balance keys, found nothing"),
        ("zero-rd\n", "expected a mapping of balance keys, found str"),
        ("balance:\n", r"expected a mapping of balance keys, found nothing \({} is an empty one\): allowed are "),
        ("balance: {iters_per_epoch: none}\n", r"iters_per_epoch='none' .* at least 1, or null \(None in Python\),"),
        ("balance: {mode: no}\n", "mode='no' is not allowed"),
        ("balance: {gamma: 0.5}\n", "unknown balance key 'gamma'"),
        ("model: {depth: 2}\n", "no section 'balance', and no key of balancing: there is model. Write the keys under"),
        ("tolerence: 0.1\nlr: 0.1\n", "unknown balance key 'tolerence'"),
        ("balance: {}\nupdate_every: 3\n", "the balance key 'update_every' stands beside the section 'balance'"),
        ("balance: {}\npaper: {alpha: 0.5}\n", "the balance key 'paper.alpha' stands beside the section 'balance'"),
        ("balance: {}\nsemi_rule: paper\n", "the balance key 'paper.semi_rule' stands beside"),
        ("balance: {paper: {alpha: 2}}\n", "paper.alpha=2 is not allowed"),
        ("ballance: {mode: off}\n", r"unknown section 'ballance' \(did you mean 'balance'\?\)"),
        ("balance: {mode: off}\nbalnace: {tolerance: 0.2}\n", r"unknown section 'balnace' \(did you mean 'balance'"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: {message}"):
        BalanceConfig.from_yaml(path)


def test_the_defaults_that_the_page_gives_may_be_written_in_yaml(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| `([a-z_.]+)` \| `?([^|`]+?)`? \| ", page)
    defaults = dict(reversed(rows))  # of a key that stands in two tables the first row
    keys = BalanceConfig().to_flat_dict().keys()
    assert keys <= defaults.keys()
    path = tmp_path / "balance.yaml"
    for key in keys:
        default = defaults[key]
        room, _, name = key.rpartition(".")
        path.write_text(f"balance: {{{room}: {{{name}: {default}}}}}" if room else f"balance: {{{name}: {default}}}")
        assert BalanceConfig.from_yaml(path) == BalanceConfig()


def test_what_other_programs_read_may_stand_beside_the_section(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text(
        "balance: {mode: off, tolerance: 2e-1}\nseed: 3\nmode: train\nalpha: 0.1\ntarget: val_loss\nlog_every: 5\n"
        "steps_per_epoch: 9\nmodel: {depth: 2}\nbatch_size: 8\nratio: 0.5\n1: one\nload_balance: {}\nshare: x\n"
        "paper: {title: x, 1: 2}\nsnapshot: daily\n"
    )
    assert BalanceConfig.from_yaml(path) == BalanceConfig(mode="off", tolerance=0.2)


def test_broken_yaml_is_a_value_error_that_names_the_file(tmp_path):
    path = tmp_path / "balance.yaml"
    path.write_text("balance: {mode: [")
    with pytest.raises(ValueError, match=r"balance\.yaml: cannot be read as YAML"):
        BalanceConfig.from_yaml(path)
