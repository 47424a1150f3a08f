"""What shape a layer's weight has on each rank: shards differ where units are away from home."""

from __future__ import annotations

from zeroresize.layers.balanced_linear import BalancedLinear


def shard_shape(layer: BalancedLinear, rank: int) -> tuple[int, int]:
    """Return [N, K] of the weight of ``layer`` on ``rank`` of its group, without asking that rank.

    It follows from the ownership map, which all ranks hold alike. In a layer of no segment all shards are equal.
    """
    num_rows, num_columns = layer.local_weight.shape
    if layer.segment is None:
        return num_rows, num_columns
    unit_tensor = next(one for one in layer.segment.tensors if one.parameter is layer.local_weight)
    size = unit_tensor.num_blocks * layer.segment.owned.counts[rank] * unit_tensor.rows
    return (size, num_columns) if layer.is_column_parallel else (num_rows, size)
