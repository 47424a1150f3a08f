"""Dataclasses as plain values, and back."""

import io
import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeroresize.utils.codec import UNSAVED, decoded, encoded, loaded, saved


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"share={self.share} is not from 0 to 1")


@dataclass
class Outer:
    """Of all that a state may hold."""

    size: int = field(metadata=UNSAVED)
    count: int = 3
    is_on: bool = True
    name: str = "x"
    color: Color = Color.BLUE
    maybe: Inner | None = None
    pair: tuple[int, float] = (1, 2.0)
    several: list[Inner] = field(default_factory=lambda: [Inner(), Inner(1.0)])
    named: dict[str, tuple[float, ...]] = field(default_factory=lambda: {"a": (1.0, float("inf"))})
    members: frozenset[tuple[int, bool]] = frozenset({(1, True), (0, False)})
    rows: NDArray[np.int64] = field(default_factory=lambda: np.arange(6).reshape(2, 3))
    numbers: NDArray[np.float64] = field(default_factory=lambda: np.array([0.5, 1.5]))
    anything: Any = None
    _hidden: float = field(default=0.1, init=False)

    def after_loading(self) -> None:
        if len(self.several) != self.size:
            raise ValueError(f"{self.size} are needed")


@dataclass
class WithTensor:
    weight: Tensor


def through_json(value):
    return json.loads(json.dumps(encoded(value)))


def test_what_was_encoded_is_decoded_also_from_json():
    state = Outer(2, maybe=Inner(0.25))
    state._hidden = 0.7
    read = decoded(Outer, through_json(state), "state", known=Outer(2))
    assert repr(read) == repr(state) and read is not state
    assert "size" not in encoded(state) and encoded(state)["hidden"] == 0.7
    assert read.rows.dtype == np.int64 and read.numbers.dtype == np.float64


def test_a_whole_state_with_tensors_is_read_by_torch_without_code():
    buffer = io.BytesIO()
    torch.save(saved(WithTensor(torch.arange(3))), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert torch.equal(loaded(WithTensor, state, "state").weight, torch.arange(3))
    with pytest.raises(ValueError, match=r"state\.format: 1 is needed, found 0"):
        loaded(WithTensor, {**state, "format": 0}, "state")
    with pytest.raises(ValueError, match=r"state: a mapping is needed, found \[\]"):
        loaded(WithTensor, [], "state")


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("count", 3.0, "count: a whole number is needed, found 3.0"),
        ("count", True, "count: a whole number is needed, found True"),
        ("is_on", 1, "is_on: true or false is needed, found 1"),
        ("name", None, "name: a text is needed, found None"),
        ("color", "green", r"color: one of \['red', 'blue'\] is needed, found 'green'"),
        ("maybe", {"share": "much"}, r"maybe\.share: a number is needed, found 'much'"),
        ("maybe", {"share": 2.0}, r"maybe: share=2\.0 is not from 0 to 1"),
        ("maybe", {}, r"maybe\.share: missing"),
        ("pair", [1], "pair: a list of 2 is needed, here is one of 1"),
        ("several", [{"share": 0.5}, 7], r"several\[1\]: a mapping is needed, found 7"),
        ("several", [], "state: 2 are needed"),
        ("named", {"a": [None]}, r"named\.a\[0\]: a number is needed, found None"),
        ("named", {1: [1.0]}, "the keys of state.named: a text is needed, found 1"),
        ("rows", [[1], [2, 3]], "rows: a list of whole numbers is needed"),
        ("rows", [0.5], "rows: a list of whole numbers is needed"),
        ("numbers", ["a"], "numbers: a list of numbers is needed"),
    ],
)
def test_what_does_not_fit_is_refused_by_where_it_is_and_what_is_needed(entry, value, message):
    known = Outer(2)
    with pytest.raises(ValueError, match=message):
        decoded(Outer, {**encoded(known), entry: value}, "state", known)
    assert repr(known) == repr(Outer(2))


def test_a_tensor_is_needed_where_there_is_to_be_one():
    with pytest.raises(ValueError, match=r"state\.weight: a tensor is needed, found \[1\.0\]"):
        decoded(WithTensor, {"weight": [1.0]}, "state")
