"""Diffusion between neighbours: φ, what moves, when it ends, and what transfers cost."""

import dataclasses
import itertools
import math
import time

import numpy as np
import pytest
from helpers.pipelines import World, all_partitions, carried_out, fastest_possible, fits_into, loads
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.simulated.diffusion import DiffusionRule, diffused_partition
from scripts.simulated.exchanges import Exchanges, potential
from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.layer_costs import LayerCosts
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad


@st.composite
def loads_and_starts(draw, **options):
    load = with_delays(draw, draw(loads(max_layers=10, max_stages=6, **options)))
    fitting = [one for one in all_partitions(load.num_layers, load.num_stages) if fits_into(load, one)]
    start = draw(st.sampled_from(fitting)) if fitting else None
    return load, start


def with_delays(draw, load):
    """With messages that stages wait for, in half of all cases."""
    delays = draw(st.lists(st.integers(0, 12), min_size=load.num_stages - 1, max_size=load.num_stages - 1))
    return dataclasses.replace(load, waits=waits_of(delays)) if draw(st.booleans()) else load


def waits_of(delays):
    return PipelineLoad.of([1.0] * (len(delays) + 1), len(delays) + 1, delays=delays).waits


def phi(load, partition):
    """By its definition."""
    times = load.stage_times(partition)
    weights = load.speeds / load.speeds.mean()
    pairs = [(u, v) for u in range(len(times)) for v in range(u)]
    return math.fsum(weights[u] * weights[v] * abs(times[u] - times[v]) for u, v in pairs)


@given(loads_and_starts())
def test_phi_is_the_weighted_sum_of_all_gaps(case):
    load, start = case
    if start is not None:
        assert potential(load.stage_times(start), load.speeds) == pytest.approx(phi(load, start), abs=1e-9)


@settings(deadline=None, max_examples=100)
@given(loads_and_starts())
def test_layers_cross_single_boundaries_in_order_and_memory_suffices_on_the_way(case):
    load, start = case
    if start is None:
        return
    diffused = diffused_partition(load, start)
    for stages in carried_out(start, diffused.transfers):
        assert [layer for own in stages for layer in own] == list(range(load.num_layers))
        assert all(load.layer_bytes[own].sum() <= limit for own, limit in zip(stages, load.memory_limits, strict=True))
    assert stages == [list(diffused.partition.layers_of(stage)) for stage in range(load.num_stages)]
    assert all(abs(transfer.source - transfer.destination) == 1 for transfer in diffused.transfers)


@settings(deadline=None, max_examples=100)
@given(loads_and_starts())
def test_phi_and_the_slowest_stage_never_rise(case):
    load, start = case
    if start is None:
        return
    diffused = diffused_partition(load, start)
    after_rounds = [diffused_partition(load, start, gamma=gamma) for gamma in diffused.potentials]
    assert diffused.potentials == pytest.approx([phi(load, one.partition) for one in after_rounds], abs=1e-9)
    for before, after in itertools.pairwise(after_rounds):
        assert phi(load, after.partition) <= phi(load, before.partition) + 1e-9
        assert load.slowest(after.partition) <= load.slowest(before.partition)


@settings(deadline=None, max_examples=100)
@given(loads_and_starts(speeds=(1.0,)))
def test_it_ends_where_the_layer_at_no_boundary_is_smaller_than_the_gap(case):
    load, start = case
    if start is None:
        return
    diffused = diffused_partition(load, start)
    times, sizes = load.stage_times(diffused.partition), load.stage_bytes(diffused.partition)
    for left in range(load.num_stages - 1):
        gap = times[left] - times[left + 1]
        source, destination = (left, left + 1) if gap > 0 else (left + 1, left)
        layers = diffused.partition.layers_of(source)
        layer = layers[-1] if gap > 0 else layers[0]
        is_held = len(layers) == 1 or sizes[destination] + load.layer_bytes[layer] > load.memory_limits[destination]
        assert is_held or load.costs[layer] >= abs(gap) or load.costs[layer] == 0
    if not load.layer_bytes.any() and min(diffused.partition.counts) > 1:
        largest = float(load.costs.max())
        assert times.max() - times.min() <= (load.num_stages - 1) * largest


@settings(deadline=None)
@given(loads(max_layers=10, max_stages=2, speeds=(1.0,), is_limited=False).filter(lambda own: own.num_stages == 2))
def test_two_equal_stages_find_the_best_partition_at_once(load):
    for start in all_partitions(load.num_layers, 2):
        diffused = diffused_partition(load, start)
        assert load.slowest(diffused.partition) == fastest_possible(load)
        assert diffused.num_rounds <= 1


@pytest.mark.parametrize("num_stages", [2, 3, 8, 16])
@pytest.mark.parametrize("start", ["first", "last", "middle", "random"])
def test_small_layers_reach_gamma_within_the_bound(num_stages, start):
    """Nearly all work on one stage is the worst start; layers are so small that whole ones are no matter."""
    num_layers = 400 * num_stages
    generator = np.random.default_rng(num_stages)
    load = PipelineLoad.of(generator.uniform(0.5, 1.5, num_layers), num_stages)
    if start == "random":
        inner = sorted(generator.choice(np.arange(1, num_layers), num_stages - 1, replace=False).tolist())
    else:
        heavy = {"first": 0, "last": num_stages - 1, "middle": num_stages // 2}[start]
        inner = [*range(1, heavy + 1), *range(num_layers - (num_stages - 1 - heavy), num_layers)]
    work = float(load.costs.sum())
    gamma = 0.02 * work
    diffused = diffused_partition(load, Partition((0, *inner, num_layers)), gamma=gamma)
    assert diffused.potentials[-1] <= gamma
    assert diffused.num_rounds <= 3 * num_stages**2 * math.log(num_stages**2 * work / gamma)
    first_branch = num_stages**2 * math.log(num_stages * work / gamma) * math.log(num_stages)
    assert diffused.num_rounds <= first_branch


def test_it_stops_in_the_first_round_that_is_good_enough():
    load = PipelineLoad.of([1.0] * 64, 8)
    start = Partition((0, *range(1, 8), 64))
    whole = diffused_partition(load, start)
    assert whole.partition.counts == (8,) * 8 and whole.potentials[-1] == 0.0
    gamma = whole.potentials[3]
    assert diffused_partition(load, start, gamma=gamma).num_rounds == whole.potentials.index(gamma)


def test_a_balanced_pipeline_stays_as_it_is():
    load = PipelineLoad.of([3.0] * 12, 4)
    diffused = diffused_partition(load, Partition.uniform(12, 4))
    assert (diffused.num_rounds, diffused.transfers) == (0, ())


def test_a_slow_device_gets_fewer_layers():
    """40 layers by speed are 12.3, 3.1, 12.3, 12.3: as wholes 3 of the slow device, 13 of another at best."""
    load = PipelineLoad.of([1.0] * 40, 4, speeds=[1.0, 0.25, 1.0, 1.0])
    partition = diffused_partition(load, Partition.uniform(40, 4)).partition
    assert partition.counts[1] == 3 and max(partition.counts) == 13


def test_stages_beside_a_slow_link_give_layers_away():
    """Both neighbours wait 4 s of 8: 6, 2, 2, 6 layers make all four stages take 6 s."""
    load = PipelineLoad.of([1.0] * 16, 4, delays=[0.0, 8.0, 0.0])
    diffused = diffused_partition(load, Partition.uniform(16, 4))
    assert diffused.partition.counts == (6, 2, 2, 6)
    assert diffused.potentials[-1] == 0.0


def test_a_pair_makes_computing_and_waiting_even_at_once():
    """7 layers and 6 s of waiting beside 13 layers."""
    load = dataclasses.replace(PipelineLoad.of([1.0] * 20, 2), waits=np.array([6.0, 0.0]))
    assert Exchanges(load, np.zeros(21), 0.0).pairs(np.array([0, 10, 20])).tolist() == [0, 7, 20]


def test_a_relay_leads_to_a_stage_that_waits_less_past_those_that_differ_by_less_than_a_layer():
    """No two neighbours of 5, 4.5, 4, 3.5, 3 s gain by handing over a layer of 1 s."""
    load = dataclasses.replace(PipelineLoad.of([1.0] * 15, 5), waits=np.array([2.0, 1.5, 1.0, 0.5, 0.0]))
    diffused = diffused_partition(load, Partition.uniform(15, 5))
    assert diffused.partition.counts == (2, 3, 3, 3, 4)
    assert load.slowest(diffused.partition) == 4.5


@pytest.mark.parametrize("num_stages", [2, 3, 8])
def test_small_layers_reach_gamma_within_the_bound_although_stages_wait(num_stages):
    """A tenth of what a stage computes is waited for at most, so every stage keeps layers."""
    generator = np.random.default_rng(num_stages)
    num_layers = 400 * num_stages
    delays = generator.uniform(0.0, 40.0, num_stages - 1)
    load = PipelineLoad.of(generator.uniform(0.5, 1.5, num_layers), num_stages, delays=delays)
    start = Partition((0, *range(num_layers - num_stages + 1, num_layers), num_layers))
    total = float(load.stage_times(start).sum())
    gamma = 0.02 * total
    diffused = diffused_partition(load, start, gamma=gamma)
    assert diffused.potentials[-1] <= gamma
    assert 1 <= diffused.num_rounds <= 3 * num_stages**2 * math.log(num_stages**2 * total / gamma)


def test_a_stage_that_waits_longer_than_others_take_keeps_a_single_layer():
    load = PipelineLoad.of([1.0] * 9, 3, delays=[0.0, 100.0])
    assert diffused_partition(load, Partition.uniform(9, 3)).partition.counts == (7, 1, 1)


def test_a_relay_gets_past_stages_that_differ_by_less_than_a_layer():
    """No two neighbours of 1, 2, 3, 4, 5 gain by handing over a layer, but all can have 3."""
    load = PipelineLoad.of([1.0] * 15, 5)
    for counts in ((1, 2, 3, 4, 5), (5, 4, 3, 2, 1), (5, 4, 4, 1, 1)):
        start = Partition((0, *itertools.accumulate(counts)))
        assert diffused_partition(load, start).partition.counts == (3,) * 5


@pytest.mark.parametrize("counts", [(3, 2, 1), (1, 2, 3)])
def test_a_stage_in_a_relay_gives_before_it_gets(counts):
    """The second stage has no memory for a third layer."""
    load = PipelineLoad.of([1.0] * 6, 3, layer_bytes=[1] * 6, memory_limits=[3, 2, 3])
    start = Partition((0, *itertools.accumulate(counts)))
    diffused = diffused_partition(load, start)
    assert diffused.partition.counts == (2, 2, 2)
    for stages in carried_out(start, diffused.transfers):
        assert len(stages[1]) <= 2


def test_two_relays_do_not_fill_one_stage_twice():
    """From both ends work could get to the third stage, which has memory for one more layer."""
    left, right = [1.0, 1.0, 1.0, 0.4, 0.6, 3.3, 0.2], [0.2, 3.3, 0.6, 0.4, 1.0, 1.0, 1.0]
    load = PipelineLoad.of([*left, 3.35, *right], 5, layer_bytes=[1] * 15, memory_limits=[9, 9, 2, 9, 9])
    diffused = diffused_partition(load, Partition((0, 5, 7, 8, 10, 15)))
    assert diffused.partition.counts[2] == 2 and load.fits(diffused.partition)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_many_relays_at_once_keep_layers_in_order_and_phi_from_rising(seed, is_uneven, is_alike):
    generator = np.random.default_rng(seed)
    num_stages = int(generator.integers(4, 24))
    num_layers = int(generator.integers(num_stages, 4 * num_stages))
    costs = np.ones(num_layers) if is_alike else generator.lognormal(0.0, 0.7, num_layers)
    speeds = generator.uniform(0.5, 1.5, num_stages) if is_uneven else None
    load = PipelineLoad.of(costs, num_stages, speeds=speeds)
    inner = sorted(generator.choice(np.arange(1, num_layers), num_stages - 1, replace=False).tolist())
    start = Partition((0, *inner, num_layers))
    diffused = diffused_partition(load, start)
    for stages in carried_out(start, diffused.transfers):
        assert [layer for own in stages for layer in own] == list(range(num_layers))
    assert stages == [list(diffused.partition.layers_of(stage)) for stage in range(num_stages)]
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(diffused.potentials))
    assert diffused.potentials[-1] == pytest.approx(phi(load, diffused.partition), abs=1e-9)


def test_a_relay_begins_behind_a_stage_that_has_one_layer():
    """The large layer of the slow device goes to the fast one only if another takes its place."""
    load = PipelineLoad.of([1.0, 1.0, 8.0, 1.0], 3, speeds=[1.0, 0.25, 4.0])
    diffused = diffused_partition(load, Partition((0, 2, 3, 4)))
    assert load.slowest(diffused.partition) == fastest_possible(load) == 4.0


@settings(deadline=None, max_examples=100)
@given(loads_and_starts(), st.integers(0, 20), st.data())
def test_transfers_never_take_longer_than_they_save(case, num_steps, data):
    load, start = case
    if start is None:
        return
    seconds = data.draw(st.lists(st.integers(0, 20), min_size=load.num_layers, max_size=load.num_layers))
    diffused = diffused_partition(load, start, transfer_s=seconds, num_steps=num_steps)
    saved_s = num_steps * (load.slowest(start) - load.slowest(diffused.partition))
    assert diffused.transfer_s <= saved_s
    assert diffused.transfer_s <= sum(seconds[one.layer] for one in diffused.transfers)
    if not num_steps:
        assert not diffused.transfers
    if diffused.transfers:
        assert diffused.transfer_s >= max(seconds[one.layer] for one in diffused.transfers)


def test_a_transfer_is_made_where_it_pays():
    """A layer of 4 s on the first of (12, 4): 4 s are saved in a step."""
    load = PipelineLoad.of([4.0] * 4, 2)
    start = Partition((0, 3, 4))
    for num_steps, counts in ((2, (3, 1)), (3, (2, 2))):
        diffused = diffused_partition(load, start, transfer_s=[10.0] * 4, num_steps=num_steps)
        assert diffused.partition.counts == counts
    assert diffused.transfer_s == 10.0


def test_a_pair_that_does_not_pay_stays_although_another_one_pays():
    """Of 10, 2, 3 and 1 s the first two become 6 and 6; the third saves 1 s twice by a transfer of 5 s."""
    load = PipelineLoad.of([1.0] * 16, 4)
    transfer_s = [1.0] * 12 + [5.0] * 3 + [1.0]
    diffused = diffused_partition(load, Partition((0, 10, 12, 15, 16)), transfer_s=transfer_s, num_steps=2)
    assert diffused.partition.counts == (6, 6, 3, 1)
    assert diffused.transfer_s == 4.0


@settings(deadline=None)
@given(loads_and_starts())
def test_free_transfers_lead_as_far_as_transfers_that_do_not_count(case):
    load, start = case
    if start is not None:
        free = diffused_partition(load, start, transfer_s=[0.0] * load.num_layers, num_steps=1)
        assert load.slowest(free.partition) == load.slowest(diffused_partition(load, start).partition)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": Partition((0, 1, 3))}, "is not one of"),
        ({"start": Partition((0, 3, 4))}, "stage 0 holds 6 bytes at the start and may hold 4"),
        ({"transfer_s": [1.0] * 4}, "together"),
        ({"num_steps": 4}, "together"),
        ({"transfer_s": [1.0] * 3, "num_steps": 4}, "transfer_s are not 4 finite"),
        ({"transfer_s": [-1.0] * 4, "num_steps": 4}, "transfer_s are not 4 finite"),
        ({"transfer_s": [1.0] * 4, "num_steps": -1}, "num_steps=-1"),
    ],
)
def test_what_diffusion_cannot_start_from_is_an_error(options, message):
    load = PipelineLoad.of([1.0] * 4, 2, layer_bytes=[2] * 4, memory_limits=[4, 8])
    arguments = {"start": Partition((0, 2, 4)), **options}
    with pytest.raises(ValueError, match=message):
        diffused_partition(load, arguments.pop("start"), **arguments)


@pytest.mark.slow
def test_ten_thousand_layers_over_a_thousand_stages_take_seconds_at_most():
    generator = np.random.default_rng(0)
    load = PipelineLoad.of(generator.lognormal(0.0, 1.0, 10_000), 1024)
    start = Partition.uniform(10_000, 1024)
    began = time.process_time()
    diffused = diffused_partition(load, start)
    assert time.process_time() - began < 6.0
    assert load.slowest(diffused.partition) < load.slowest(start)


def test_a_rule_proposes_what_diffusion_reaches():
    rule = DiffusionRule("time", "1f1b", 16, 10)
    world = World([2.0] * 4 + [1.0] * 8, [1.0, 1.0], (0, 6, 12))
    profile = world.profile()
    proposal = rule.propose(LayerCosts.first(profile), profile, MoveCost(0.0, 0.0))
    wanted = diffused_partition(rule.load(LayerCosts.first(profile), profile), Partition((0, 6, 12))).partition
    assert (proposal.before, proposal.after) == ((0, 6, 12), wanted.boundaries) and proposal.saving_s > 0.0
