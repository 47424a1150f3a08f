"""Fewer stages: which stay, what moves, and when it cannot be."""

import itertools
import re

import numpy as np
import pytest
from helpers.pipelines import all_partitions, carried_out, fastest_possible, fits_into, loads
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.fewer_stages import can_hold, repacked
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad


def is_possible(load, num_stages, keep=None):
    """Whether any stages, ``keep`` among them, and any partition over them hold all layers."""
    return any(
        fits_into(load.on_stages(stages), partition)
        for stages in itertools.combinations(range(load.num_stages), num_stages)
        if keep is None or keep in stages
        for partition in all_partitions(load.num_layers, num_stages)
    )


@st.composite
def cases(draw):
    load = draw(loads(max_layers=7, max_stages=5))
    start = draw(st.sampled_from(list(all_partitions(load.num_layers, load.num_stages))))
    keep = draw(st.none() | st.integers(0, load.num_stages - 1))
    return load, start, draw(st.integers(1, load.num_stages)), draw(st.booleans()), keep


@settings(deadline=None, max_examples=150)
@given(cases())
def test_so_many_stages_hold_all_layers_where_any_can(case):
    load, start, num_stages, balances, keep = case
    options = {"balances": balances, "keep": keep}
    if not is_possible(load, num_stages, keep):
        with pytest.raises(ValueError, match=r"stages( with stage \d among them)? can(not)? hold"):
            repacked(load, start, num_stages, **options)
        return
    repacking = repacked(load, start, num_stages, **options)
    assert keep is None or keep in repacking.stages
    assert len(repacking.stages) == repacking.partition.num_stages == num_stages
    assert list(repacking.stages) == sorted(set(repacking.stages)) and repacking.stages[-1] < load.num_stages
    on_stages = load.on_stages(repacking.stages)
    assert fits_into(on_stages, repacking.partition)
    *_, after = carried_out(start, repacking.transfers)
    assert [after[stage] for stage in repacking.stages] == [
        list(repacking.partition.layers_of(i)) for i in range(num_stages)
    ]
    assert sum(map(len, after)) == load.num_layers
    assert all(one.source != one.destination for one in repacking.transfers)
    if balances:
        assert on_stages.slowest(repacking.partition) == fastest_possible(on_stages)


@settings(deadline=None, max_examples=80)
@given(loads(max_layers=7, max_stages=5, is_limited=True))
def test_an_error_says_how_few_are_possible(load):
    start = Partition.uniform(load.num_layers, load.num_stages)
    possible = [number for number in range(1, load.num_stages + 1) if is_possible(load, number)]
    if possible and possible[0] == 1:
        return
    with pytest.raises(ValueError) as error:
        repacked(load, start, 1)
    stated = re.search(r"at least (\d+) are needed", str(error.value))
    if possible:
        assert stated is not None and int(stated[1]) == possible[0]
    else:
        assert str(error.value).startswith(f"not even all {load.num_stages} stages")
    assert f"{load.byte_sums[-1]:.0f} bytes" in str(error.value)


@settings(deadline=None, max_examples=80)
@given(cases())
def test_whether_so_many_stages_can_hold_all_layers(case):
    load, _, _, _, keep = case
    for number in range(1, load.num_stages + 1):
        assert can_hold(load, number, keep=keep) == is_possible(load, number, keep)


def test_first_fit_moves_whole_stages_to_the_next_and_nothing_else():
    """Stage 0 goes to 1; 1, now full, stays; 2 goes to 3; then there are as few as wanted."""
    load = PipelineLoad.of([1.0] * 10, 5, layer_bytes=[1] * 10, memory_limits=[5, 4, 5, 9, 9])
    repacking = repacked(load, Partition.uniform(10, 5), 3, balances=False)
    assert repacking.stages == (1, 3, 4)
    assert repacking.partition.counts == (4, 4, 2)
    assert [(one.layer, one.source, one.destination) for one in repacking.transfers] == [
        (0, 0, 1),
        (1, 0, 1),
        (4, 2, 3),
        (5, 2, 3),
    ]


def test_first_fit_asks_for_the_memory_of_the_stage_that_gets_the_layers():
    load = PipelineLoad.of([1.0] * 6, 3, layer_bytes=[1] * 6, memory_limits=[9, 3, 9])
    repacking = repacked(load, Partition.uniform(6, 3), 2, balances=False)
    assert repacking.stages == (0, 2)
    assert [(one.layer, one.source, one.destination) for one in repacking.transfers] == [(2, 1, 2), (3, 1, 2)]


def test_first_fit_hands_layers_towards_the_stage_that_must_stay():
    load = PipelineLoad.of([1.0] * 10, 5, layer_bytes=[1] * 10, memory_limits=[9] * 5)
    start = Partition.uniform(10, 5)
    assert repacked(load, start, 2, balances=False, keep=0).stages == (0, 1)
    repacking = repacked(load, start, 2, balances=False, keep=0)
    assert repacking.partition.counts == (2, 8) and {one.destination for one in repacking.transfers} == {1}
    assert repacked(load, start, 2, balances=False, keep=2).stages == (2, 3)
    with pytest.raises(ValueError, match=r"no 1 of 2 stages with stage 0 among them .* at least 2 are needed"):
        repacked(
            PipelineLoad.of([1.0] * 2, 2, layer_bytes=[1] * 2, memory_limits=[1, 9]), Partition.uniform(2, 2), 1, keep=0
        )


def test_stages_that_do_not_fit_as_wholes_are_divided():
    """Four stages of 6 bytes, of which no two fit into 9, but three hold 8 each."""
    load = PipelineLoad.of([1.0] * 12, 4, layer_bytes=[2] * 12, memory_limits=[9] * 4)
    repacking = repacked(load, Partition.uniform(12, 4), 3, balances=False)
    assert repacking.partition.counts == (4, 4, 4)
    with pytest.raises(ValueError, match=r"no 2 of 4 stages .* at least 3 are needed"):
        repacked(load, Partition.uniform(12, 4), 2)


def test_the_stages_with_enough_memory_are_found():
    load = PipelineLoad.of([1.0] * 6, 3, layer_bytes=[1] * 6, memory_limits=[6, 2, 2])
    repacking = repacked(load, Partition.uniform(6, 3), 1)
    assert repacking.stages == (0,)
    assert {one.destination for one in repacking.transfers} == {0}


def test_as_many_as_there_are_moves_nothing_unless_balanced():
    load = PipelineLoad.of([1.0, 1.0, 1.0, 3.0], 2)
    start = Partition((0, 1, 4))
    assert repacked(load, start, 2, balances=False).transfers == ()
    assert repacked(load, start, 2).partition == Partition((0, 3, 4))


def test_other_numbers_of_stages_are_an_error():
    load = PipelineLoad.of(np.ones(4), 2)
    for number in (0, 3):
        with pytest.raises(ValueError, match="wanted are 1 to 2"):
            repacked(load, Partition.uniform(4, 2), number)
    with pytest.raises(ValueError, match="is not one of"):
        repacked(load, Partition.uniform(4, 3), 1)
