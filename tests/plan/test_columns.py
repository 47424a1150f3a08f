"""Columns of a matrix: a view and a gather say the same."""

from __future__ import annotations

import pytest
import torch

from zeroresize.plan.columns import Columns


@pytest.mark.parametrize("order", [[2, 3, 4], [4, 3, 2], [5, 0, 3], [6], [], list(range(7))], ids=str)
def test_reading_and_writing_meet_the_columns_named_in_their_order(order: list[int]) -> None:
    columns = Columns.at(torch.tensor(order, dtype=torch.int64))
    matrix = torch.arange(21.0).reshape(3, 7)
    values = -torch.arange(1.0, 3 * len(order) + 1).reshape(3, len(order))
    for i, column in enumerate(order):
        assert torch.equal(columns.of(matrix)[:, i], matrix[:, column])
    put, added = matrix.clone(), matrix.clone()
    columns.put(put, values)
    columns.add(added, values)
    for column in range(7):
        named = column in order
        value = values[:, order.index(column)] if named else torch.zeros(3)
        assert torch.equal(put[:, column], value if named else matrix[:, column])
        assert torch.equal(added[:, column], matrix[:, column] + value)


def test_neighbours_are_read_without_a_copy_and_copies_are_contiguous_in_memory_of_their_own() -> None:
    for matrix, order, is_view in (
        (torch.arange(21.0).reshape(3, 7), range(7), True),
        (torch.arange(7.0).reshape(1, 7), (2, 3, 4), True),
        (torch.zeros(2, 6), (1, 3), False),
    ):
        columns = Columns.at(torch.tensor(order))
        memory = matrix.untyped_storage().data_ptr()
        assert (columns.of(matrix).untyped_storage().data_ptr() == memory) == is_view
        copied = columns.copy_of(matrix)
        assert torch.equal(copied, columns.of(matrix)) and copied.is_contiguous()
        assert copied.untyped_storage().data_ptr() != memory
