"""Plans of switches: complete, nothing twice, nothing that is already there, senders loaded evenly."""

import dataclasses
import math
import time

import numpy as np
import pytest
from helpers.strategies import least_volumes, switch_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.layout import TensorSpec, UnitDivision
from zeroresize.plan.strategy import Strategy
from zeroresize.plan.transfers import common_slices
from zeroresize.policy.strategy.switches.switch_plan import plan_gradients, plan_weights
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds

LINKS = LinkSpeeds(within_bytes_per_s=8.0, between_bytes_per_s=2.0, latency_s=0.5)


def held_units(layout, tensors):
    """[R, P, most units]: whether a rank holds a unit."""
    units = np.arange(max(one.num_units for one in tensors))
    return ((layout.begins.T[..., None] <= units) & (units < layout.ends.T[..., None])).astype(np.int64)


def check_volumes(plan, case):
    """The plan's volumes are those of its transfers; they are in one order on all ranks."""
    volumes = np.zeros((2, 2, len(case.nodes)), dtype=np.int64)
    for transfer in plan.transfers:
        link = int(case.nodes[transfer.source] != case.nodes[transfer.destination])
        size = (transfer.end - transfer.begin) * case.tensors[transfer.tensor].unit_bytes
        assert transfer.source != transfer.destination and size > 0
        volumes[link, 0, transfer.source] += size
        volumes[link, 1, transfer.destination] += size
    assert np.array_equal(volumes.transpose(1, 0, 2), plan.volumes)
    assert plan.most_bytes == volumes.sum(axis=0).max()
    summed = np.zeros((2, len(case.nodes)), dtype=np.int64)
    for tensor, begin, end, *ranks in plan.summed:
        summed[(0, 1), ranks] += (end - begin) * case.tensors[tensor].unit_bytes
    assert np.array_equal(summed, plan.summed_bytes)
    slowest = max(volumes[0].max() / 8.0, volumes[1].max() / 2.0) + summed.max() / 8.0
    latencies = 0.5 * (1 + bool(len(plan.summed)))
    assert plan.seconds(LINKS) == pytest.approx(slowest + latencies if len(plan.transfers) else 0.0)
    assert list(plan.transfers) == sorted(
        plan.transfers, key=lambda one: (one.tensor, one.begin, one.destination, one.source)
    )


@given(switch_cases(), st.booleans())
def test_weights_get_to_whoever_lacks_them_once_and_from_holders(case, heuristics):
    plan = plan_weights(*case, heuristics=heuristics)
    before, after = (held_units(one, case.tensors) for one in (case.before, case.after))
    got = np.zeros_like(before)
    for tensor, begin, end, source, destination in plan.transfers:
        assert before[source, tensor, begin:end].all()
        got[destination, tensor, begin:end] += 1
        holders = np.flatnonzero(before[:, tensor, begin:end].all(axis=1))
        if heuristics:
            near = [rank for rank in holders if case.nodes[rank] == case.nodes[destination]]
            assert not near or source in near
        else:
            assert source == holders[0]
    assert np.array_equal(got, after * (1 - before))
    assert not len(plan.kept)
    check_volumes(plan, case)


@given(switch_cases(), st.booleans())
def test_every_partial_gradient_is_added_in_one_replica_of_the_optimizer_layout(case, heuristics):
    """Source replica i's partial gradient is 2 ** i, so a sum tells which ones are in it, and how often.

    What nodes sum first is counted with the numbers that are there before any of it has arrived.
    """
    source, optimizer_layout, tensors, _ = case
    plan = plan_gradients(*case, heuristics=heuristics)
    of_source, of_optimizer = held_units(source, tensors), held_units(optimizer_layout, tensors)
    sums, parts = np.zeros_like(of_optimizer), of_source * 2 ** np.maximum(source.replicas, 0)[:, None, None]
    first_parts = parts.copy()
    for tensor, begin, end, sender, root in plan.summed:
        assert heuristics and sender != root and case.nodes[sender] == case.nodes[root]
        assert of_source[sender, tensor, begin:end].all() and of_source[root, tensor, begin:end].all()
        parts[root, tensor, begin:end] += first_parts[sender, tensor, begin:end]
    for transfer in (*plan.transfers, *plan.kept):
        assert of_source[transfer.source, transfer.tensor, transfer.begin : transfer.end].all()
        assert of_optimizer[transfer.destination, transfer.tensor, transfer.begin : transfer.end].all()
        units = transfer.tensor, slice(transfer.begin, transfer.end)
        sums[transfer.destination][units] += parts[transfer.source][units]
    assert all(one.source == one.destination for one in plan.kept)
    total = np.zeros_like(sums[0])
    for replica in range(optimizer_layout.num_replicas):
        ranks = np.flatnonzero(optimizer_layout.replicas == replica)
        most = (sums[ranks] * of_optimizer[ranks]).max(axis=0)
        assert np.array_equal(sums[ranks], most * of_optimizer[ranks])  # the same on all ranks that hold it
        total += most
    is_unit = of_optimizer.any(axis=0)
    assert np.array_equal(total, (2**source.num_replicas - 1) * is_unit)
    check_volumes(plan, case)


@given(switch_cases())
def test_gradients_of_the_optimizer_layout_stay_where_they_are(case):
    plan = plan_gradients(case.before, case.before, case.tensors, case.nodes)
    assert not len(plan.transfers)


@given(switch_cases(most_ranks=6))
@settings(max_examples=60)
def test_no_rank_sends_much_more_than_it_has_to(case):
    plan = plan_weights(*case)
    slices = common_slices(case.before, case.after, case.tensors)
    within, between = least_volumes(slices, case.nodes)
    # What is known of placing each job on the least loaded machine that may have it (Azar, Naor, Rom 1992).
    factor = math.ceil(math.log2(max(len(case.nodes), 2))) + 1
    assert plan.volumes[0, 0].max() <= factor * within
    assert plan.volumes[0, 1].max() <= factor * between


def whole_tensors(*sizes):
    return [TensorSpec(f"tensor {number}", 0, (size,), 1) for number, size in enumerate(sizes)]


@pytest.mark.parametrize(("sizes", "largest"), [([3] * 8, 12), ([1] * 3 + [3], 3), ([2, 2, 3, 3], 5)])
def test_holders_of_the_same_tensors_share_the_sending_as_the_optimum_does(sizes, largest):
    """Two ranks hold everything, a third one lacks it; the last tensors are placed first where they are larger."""
    tensors = whole_tensors(*sizes)
    before, after = (Strategy(dp=dp).layout(tensors, 3, 1) for dp in (2, 3))
    assert plan_weights(before, after, tensors, [0, 0, 0]).volumes[0, 0].max() == largest
    assert least_volumes(common_slices(before, after, tensors), [0, 0, 0]) == (largest, 0)
    assert plan_weights(before, after, tensors, [0, 0, 0], heuristics=False).volumes[0, 0].max() == sum(sizes)
    assert plan_weights(before, after, tensors, [0, 0, 1]).volumes[0, 1].max() == largest


def test_a_tensor_that_is_large_beside_the_others_is_cut_between_its_units():
    table = [TensorSpec("embedding", 0, (1000, 4), 2, UnitDivision(0, 100, 10))]
    before, after = (Strategy(dp=dp).layout(table, 4, 1) for dp in (3, 4))
    plan = plan_weights(before, after, table, [0, 0, 0, 0])
    assert plan.volumes[0, 0].tolist() == pytest.approx([8000 / 3] * 3 + [0], rel=0.15)
    assert plan.volumes[0, 0].sum() == 8000


def test_replicas_of_one_node_are_summed_there_and_one_sum_leaves_it():
    """Four replicas on two nodes, the optimizer's one on a third: of each tensor it gets two sums, not four parts."""
    tensors = whole_tensors(4, 4)
    source, optimizer_layout = (
        Strategy(dp=len(ranks), ranks=ranks).layout(tensors, 5, 1) for ranks in (range(4), (4,))
    )
    plan = plan_gradients(source, optimizer_layout, tensors, [0, 0, 1, 1, 2])
    assert plan.volumes[1, 1].tolist() == [0, 0, 0, 0, 16]
    assert plan.volumes[0, 1].tolist() == [4, 4, 4, 4, 0]  # the ranks of a node send the sum of a tensor each
    assert plan.summed_bytes.tolist() == [[4, 4, 4, 4, 0]] * 2
    without = plan_gradients(source, optimizer_layout, tensors, [0, 0, 1, 1, 2], heuristics=False)
    assert without.volumes[1, 1].tolist() == [0, 0, 0, 0, 32] and not len(without.summed)
    near = plan_gradients(source, optimizer_layout, tensors, [0, 0, 0, 0, 0])
    assert not len(near.summed)  # summed where they arrive


def test_a_link_that_a_node_shares_holds_up_what_its_ranks_send_together():
    """Both ranks of the first node send a tensor of four bytes to the second node."""
    tensors = whole_tensors(4, 4)
    before = Strategy(dp=2, ranks=(0, 1)).layout(tensors, 3, 1)
    after = Strategy(ranks=(2,)).layout(tensors, 3, 1)
    plan = plan_weights(before, after, tensors, [0, 0, 1])
    assert plan.volumes[0, 1].tolist() == [4, 4, 0]
    for node_speed, seconds in ((8.0, 4.0), (1.0, 8.0)):
        links = LinkSpeeds(100.0, 2.0, node_bytes_per_s=node_speed)
        assert plan.seconds(links) == seconds


def test_layouts_that_do_not_belong_together_are_an_error():
    tensors = whole_tensors(4, 4)
    layout = Strategy(dp=2).layout(tensors, 2, 1)
    with pytest.raises(ValueError, match="do not belong together"):
        plan_weights(layout, Strategy(dp=2).layout(tensors, 3, 1), tensors, [0, 0])
    with pytest.raises(ValueError, match="3 ranks have a node, but the layouts have 2"):
        plan_weights(layout, layout, tensors, [0, 0, 0])
    nothing = dataclasses.replace(layout, ends=layout.begins)
    with pytest.raises(ValueError, match="no rank holds all units of tensor 0"):
        plan_weights(nothing, layout, tensors, [0, 0])
    part = dataclasses.replace(layout, ends=layout.ends * [1, 0])
    with pytest.raises(ValueError, match="a replica of the layouts does not hold all units"):
        plan_gradients(part, layout, tensors, [0, 0])


@pytest.mark.parametrize("plan", [plan_weights, plan_gradients])
def test_a_thousand_ranks_and_a_thousand_tensors_take_less_than_a_second(plan):
    tensors = [
        TensorSpec(f"tensor {number}", number // 10, (2**12, 2**8), 2, UnitDivision(0, 64, 64) if number % 5 else None)
        for number in range(1000)
    ]
    begin = time.process_time()
    before, after = (Strategy(*degrees).layout(tensors, 1024, 100) for degrees in ((8, 16, 8), (32, 8, 4)))
    switch = plan(before, after, tensors, [rank // 8 for rank in range(1024)])
    assert time.process_time() - begin < 1.0
    assert len(switch.transfers) > 50_000
