"""Strategies: what is allowed, the groups of ranks, and the layouts that follow."""

import numpy as np
import pytest
from helpers.strategies import some_strategy
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.plan.layout import TensorSpec, UnitDivision
from zeroresize.plan.strategy import Strategy


def test_ranks_go_to_shards_then_replicas_then_stages():
    strategy = Strategy(2, 2, 2)
    assert [strategy.position_of(rank) for rank in (0, 1, 2, 4)] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0)]
    assert strategy.tp_groups() == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert strategy.dp_groups() == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert strategy.pipelines() == [(0, 4), (1, 5), (2, 6), (3, 7)]


@given(some_strategy(8))
def test_groups_and_positions_say_the_same(strategy):
    assert strategy.num_ranks == strategy.dp * strategy.tp * strategy.pp
    for rank in strategy.ranks:
        assert strategy.rank_at(strategy.position_of(rank)) == rank
    for rank in set(range(8)) - set(strategy.ranks):
        assert strategy.position_of(rank) is None
    same = {  # what the ranks of a group have in common, and the size of a group
        "tp_groups": (("replica", "stage"), strategy.tp),
        "dp_groups": (("stage", "shard"), strategy.dp),
        "pipelines": (("replica", "shard"), strategy.pp),
    }
    for name, (fields, size) in same.items():
        groups = getattr(strategy, name)()
        assert sorted(rank for group in groups for rank in group) == sorted(strategy.ranks)
        for group in groups:
            positions = [strategy.position_of(rank) for rank in group]
            assert len(group) == size and positions == sorted(positions)
            assert len({tuple(getattr(one, field) for field in fields) for one in positions}) == 1


@given(some_strategy(8), st.integers(2, 4))
def test_every_replica_holds_everything_once_but_for_copies_of_what_is_whole(strategy, num_layers):
    tensors = [
        TensorSpec(f"tensor {number}", number // 2, (24,), 4, UnitDivision(0, 12, 2) if number % 2 else None)
        for number in range(2 * num_layers)
    ]
    layout = strategy.layout(tensors, 9, num_layers)
    assert layout.num_replicas == strategy.dp
    for number, tensor in enumerate(tensors):
        for replica in range(strategy.dp):
            held = [
                unit for rank in np.flatnonzero(layout.replicas == replica) for unit in layout.units_of(number, rank)
            ]
            copies = 1 if tensor.division else strategy.tp
            assert sorted(held) == sorted(list(range(tensor.num_units)) * copies)
    for rank in range(9):
        position = strategy.position_of(rank)
        assert layout.replicas[rank] == (position.replica if position else -1)
        held = {tensors[number].layer for number in range(len(tensors)) if layout.units_of(number, rank)}
        stages = strategy.partition(num_layers).stages
        assert held <= {layer for layer in range(num_layers) if position and stages[layer] == position.stage}


def test_shares_and_boundaries_divide_as_they_say():
    tensors = [TensorSpec(f"tensor {layer}", layer, (8,), 4, UnitDivision(0, 4, 2)) for layer in range(3)]
    layout = Strategy(1, 2, 2, shares=(3, 1), boundaries=(0, 1, 3)).layout(tensors, 4, 3)
    assert (layout.ends - layout.begins).tolist() == [[3, 1, 0, 0], [0, 0, 3, 1], [0, 0, 3, 1]]
    assert Strategy(1, 2, 1, shares=(2, 2)) == Strategy(1, 2, 1)
    assert Strategy(1, 2, 1, shares=(6, 2)) == Strategy(1, 2, 1, shares=(3, 1))


def test_yaml_gives_strategies_and_takes_them_back():
    for value, strategy in (
        ([2, 2, 1], Strategy(2, 2, 1)),
        ({"tp": 2, "ranks": [3, 1]}, Strategy(1, 2, 1, ranks=(3, 1))),
        ({"tp": 2, "pp": 2, "shares": [2, 1], "boundaries": [0, 1, 4]}, Strategy(1, 2, 2, (), (2, 1), (0, 1, 4))),
    ):
        assert Strategy.of(value) == strategy
        assert Strategy.of(strategy.as_dict()) == strategy
        assert Strategy.of(strategy) is strategy


def test_strategies_that_are_not_allowed_say_why():
    for value, message in (
        ([0, 1, 1], "strategy dp"),
        ([1, 1.5, 1], "strategy tp"),
        ([1, 1], r"strategy \[1, 1\]: \[dp, tp, pp\] is needed"),
        ({"dp": 2, "width": 1}, "width"),
        ({"dp": 2, "ranks": [0, 0]}, "not 2 different ranks"),
        ({"dp": 2, "ranks": [0, 1, 2]}, "not 2 different ranks"),
        ({"dp": 2, "ranks": [0, -1]}, "strategy ranks"),
        ({"dp": 2, "ranks": "01"}, "a list of numbers is needed"),
        ({"tp": 2, "shares": [1]}, "wanted are tp = 2 numbers"),
        ({"tp": 2, "shares": [1, -1]}, "none negative"),
        ({"tp": 2, "shares": [0, 0]}, "not all zero"),
        ({"tp": 2, "shares": [1, "2"]}, "wanted are tp = 2 numbers"),
        ({"pp": 2, "boundaries": [0, 4]}, r"must have pp \+ 1 = 3 entries"),
        ({"pp": 2, "boundaries": [0, 3, 2]}, "begin with 0 and rise"),
    ):
        with pytest.raises(ValueError, match=message):
            Strategy.of(value)


def test_models_and_jobs_that_a_strategy_does_not_fit_are_an_error():
    heads = [TensorSpec("query", 0, (6,), 4, UnitDivision(0, 6, 1))]
    with pytest.raises(ValueError, match="6 units of query do not divide by tp=4"):
        Strategy(1, 4, 1).layout(heads, 4, 1)
    assert Strategy(1, 4, 1, shares=(1, 1, 1, 2)).layout(heads, 4, 1).ends.max() == 6
    with pytest.raises(ValueError, match="needs rank 3: there are 3 ranks"):
        Strategy(2, 2, 1).layout(heads, 3, 1)
    with pytest.raises(ValueError, match=r"strategy \(1, 1, 2\): "):
        Strategy(1, 1, 2).partition(1)
    with pytest.raises(ValueError, match=r"boundaries \[0, 1, 2\]"):
        Strategy(1, 1, 2, boundaries=(0, 1, 2)).partition(3)
