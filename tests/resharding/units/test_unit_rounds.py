"""Messages: rounds that obey a bound, and units that arrive where they belong."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zeroresize.layers.segment import UnitTensor
from zeroresize.plan.ownership import OwnershipMap, transfer_plan
from zeroresize.resharding.units.unit_rounds import UnitSlice, UnitStack, copy_units, parts_of, stacks, unit_rounds


@st.composite
def plans(draw):
    ranks = draw(st.integers(2, 5))
    plans = []
    for _ in range(draw(st.integers(1, 3))):
        units = draw(st.integers(1, 30))
        owners = st.lists(st.integers(0, ranks - 1), min_size=units, max_size=units)
        plans.append(transfer_plan(*(OwnershipMap(np.array(draw(owners)), ranks) for _ in range(2))))
    return plans, [draw(st.integers(1, 50)) for _ in plans], draw(st.integers(1, 300))


@given(plans())
def test_rounds_send_every_unit_once_and_hold_no_more_than_is_allowed(case):
    plans, unit_bytes, most = case
    left = [{pair: units.tolist() for pair, units in plan.items()} for plan in plans]
    for slices_of in unit_rounds(plans, unit_bytes, most):
        assert slices_of
        loads, counts = {}, {}
        for pair, slices in slices_of.items():
            for unit_slice in slices:
                for unit in unit_slice.units.tolist():
                    left[unit_slice.segment][pair].remove(unit)
                for rank in pair:
                    loads[rank] = loads.get(rank, 0) + len(unit_slice.units) * unit_bytes[unit_slice.segment]
                    counts[rank] = counts.get(rank, 0) + len(unit_slice.units)
        assert all(load <= most or counts[rank] == 1 for rank, load in loads.items())
    assert not any(units for plan in left for units in plan.values())


@given(
    st.lists(st.booleans(), min_size=1, max_size=80),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.sampled_from([0, 1]),
)
def test_units_are_copied_to_their_places_by_runs_and_by_index(chosen, rows, dim):
    units = np.flatnonzero(chosen)
    shape = [3, 3]
    shape[dim] = len(chosen) * sum(rows)
    source = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    where = UnitTensor(nn.Module(), "", "", dim, tuple(rows))
    target = torch.full_like(source, -1.0)
    for source_stack, target_stack in zip(
        stacks(source, where, len(chosen)), stacks(target, where, len(chosen)), strict=True
    ):
        packed = torch.empty(source_stack.shape[0], len(units), source_stack.shape[2])
        copy_units(packed, np.arange(len(units)), source_stack, units)
        copy_units(target_stack, units, packed, np.arange(len(units)))
    row_is_chosen = torch.cat([torch.tensor(chosen).repeat_interleave(of_part) for of_part in rows])
    is_chosen = row_is_chosen[:, None] if dim == 0 else row_is_chosen[None, :]
    assert torch.equal(target, torch.where(is_chosen, source, torch.tensor(-1.0)))


def test_a_message_holds_tensors_of_several_dtypes_beside_each_other():
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.uint8)
    tensors = [
        UnitStack(number % 2, dtype, None, torch.empty(1, 9, 3, dtype=dtype)) for number, dtype in enumerate(dtypes)
    ]
    slices = [UnitSlice(0, np.arange(5)), UnitSlice(1, np.arange(3))]
    message = torch.empty(5 * 3 * (8 + 2) + 3 * 3 * (4 + 1), dtype=torch.uint8)
    parts = parts_of(message, slices, tensors)
    for value, (unit_slice, number, part) in enumerate(parts):
        assert part.dtype == dtypes[number] and part.shape == (1, len(unit_slice.units), 3)
        part.fill_(value)
    assert all((part == value).all() for value, (_, _, part) in enumerate(parts))  # none lies on another
    assert sum(part.numel() * part.element_size() for *_, part in parts) == message.numel()
