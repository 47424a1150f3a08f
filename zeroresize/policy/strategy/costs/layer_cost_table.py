"""What layers cost, by kind and tensor-parallel degree: seconds and bytes of a micro-batch.

A micro-batch of ``T`` tokens in sequences of several lengths takes a layer ``a + b·T + c·Σ length²`` seconds: matrix
products and messages grow with the tokens, attention with the squares of the sequences' lengths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from zeroresize.utils.codec import decoded, encoded
from zeroresize.utils.value_checks import number


@dataclass(frozen=True)
class LayerCost:
    """Hold the cost of a layer's forward and backward on one rank of a tensor-parallel group of a certain size.

    Attributes:
        fixed_s: a, seconds of a micro-batch, however small.
        token_s: b, seconds of a token.
        square_s: c, seconds of a length² of 1.
        token_bytes: memory that a token takes from its forward to its backward.

    Raises:
        ValueError: for what is negative or not finite.
    """

    fixed_s: float
    token_s: float
    square_s: float
    token_bytes: float

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            number(f"layer cost {key}", value, least=0.0)

    def seconds(self, tokens: float, squares: float) -> float:
        """Return the seconds of a micro-batch of so many tokens, whose lengths' squares are ``squares`` in sum."""
        return self.fixed_s + self.token_s * tokens + self.square_s * squares


@dataclass(frozen=True)
class LayerCostTable:
    """Hold the costs of all layers of a model.

    Attributes:
        kinds: [L] of each layer; layers of one kind cost the same.
        costs: of each kind by tensor-parallel degree.
        boundary_bytes: what a token takes on its way from a stage to the next one.

    Raises:
        ValueError: for a kind without costs, kinds with costs for different degrees, or boundary bytes that are
            negative or not finite.
    """

    kinds: tuple[str, ...]
    costs: Mapping[str, Mapping[int, LayerCost]]
    boundary_bytes: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(self.kinds))
        number("boundary_bytes", self.boundary_bytes, least=0.0)
        if not self.kinds:
            raise ValueError("costs of no layer are given: at least one is needed")
        missing = sorted(set(self.kinds) - set(self.costs))
        if missing:
            raise ValueError(f"layers of the kinds {missing} have no costs: there are those of {sorted(self.costs)}")
        if len({tuple(sorted(by_degree)) for by_degree in self.costs.values()}) != 1:
            raise ValueError("all kinds of layers need costs for the same tensor-parallel degrees")

    @property
    def num_layers(self) -> int:
        """Return L, the number of layers."""
        return len(self.kinds)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Return the tensor-parallel degrees that have costs, ascending."""
        return tuple(sorted(self.costs[self.kinds[0]]))

    def stage_cost(self, layers: range, tp: int) -> LayerCost:
        """Return what some layers cost together.

        Raises:
            ValueError: for a tensor-parallel degree without costs.
        """
        if tp not in self.degrees:
            raise ValueError(f"layers have no costs for tp={tp}: there are those of tp in {list(self.degrees)}")
        layer_costs = [self.costs[self.kinds[layer]][tp] for layer in layers]
        keys = ("fixed_s", "token_s", "square_s", "token_bytes")
        return LayerCost(*(math.fsum(getattr(one, key) for one in layer_costs) for key in keys))

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        Path(path).write_text(json.dumps(encoded(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> LayerCostTable:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: as the class does, and for what is no table.
        """
        return decoded(cls, json.loads(Path(path).read_text(encoding="utf-8")), "layer costs")
