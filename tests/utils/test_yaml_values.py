"""YAML from anybody: read as people mean it, or refused with its line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from zeroresize.utils.yaml_values import load_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("1e-3", 0.001),
        ("1_000", 1000),
        ("007", 7),
        ("0x10", 16),
        ("9223372036854775807", 2**63 - 1),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("x: &a {k: 1, l: 2}\ny: {<<: *a, k: 3}", {"x": {"k": 1, "l": 2}, "y": {"k": 3, "l": 2}}),
    ],
)
def test_values_are_what_people_mean(text: str, value: object) -> None:
    assert load_yaml(text) == value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"mode: \xff\xfe\n", "unacceptable character"),
        (b"\x00\x01\x02", "unacceptable character"),
        (b"a: 1\nb:\n  c: 1\n  c: 2\n", "line 4, column 3: the key 'c' is in line 3 already"),
        (b"{1: a, 1: b}", "line 1, column 8: the key 1 is in"),
        (b"a: " + b"[" * 5000, "nested too deep"),
        (b"a: 1\nb: " + b"1" * 5000, "line 2, column 4: no value of tag:yaml.org,2002:int"),
        (b"!!int x", "line 1, column 1: no value of"),
        (b"!!bool maybe", "no value of"),
        (b"!!timestamp x", "no value of"),
        (b"a: b: c", "line 1, column 5: mapping values are not allowed here"),
        (b"{[1]: 2}", "found unhashable key"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once_with_file_and_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "own.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"own\.yaml: cannot be read as YAML: ") as refused:
        read_yaml(path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize("text", ["!!python/object/apply:os.mkdir ['{made}']", "!!python/name:os.mkdir"])
def test_nothing_in_a_file_runs_code(tmp_path: Path, text: str) -> None:
    made = tmp_path / "made"
    with pytest.raises(yaml.YAMLError, match="could not determine a constructor"):
        load_yaml(text.format(made=made))
    assert not os.path.exists(made)
