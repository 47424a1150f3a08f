"""The largest of all ranks' numbers by magnitude, exactly, without gathering them.

Non-negative floats are ordered as their bit patterns are, so the smallest magnitude that is kept, the threshold, is
found digit by digit from the top, 11 bits at a time: the ranks add up histograms of the next digit of those numbers
that agree with the threshold so far. Of the numbers that equal the threshold the first ones are kept, in the order of
ranks, tensors and elements: those that a stable sort of all numbers on one rank would keep.

**Traffic** of each rank, whatever the number of numbers: 5 all-reduces of 37 kB together for dtypes up to 32 bits, 8 of
84 kB for float64, and 16 bytes more for each rank. (The paper's Algorithm 1 gathers every rank's k largest on one.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import all_reduce, group_rank, group_size, message_device

_DIGIT_BITS = 11


def global_top_k(tensors: Sequence[Tensor], k: int, process_group: ProcessGroup, device: torch.device) -> list[Tensor]:
    """Masks, True for the ``k`` numbers of largest magnitude of all ranks' tensors; collective.

    Args:
        tensors: of this rank, of floating dtypes; there may be none. NaN counts as the largest.
        k: the same on all ranks.
        device: where the tensors are.

    Returns:
        One mask of each tensor's shape.

    Raises:
        ValueError: on every rank, if they give different ``k``, or there are fewer numbers.
    """
    where = message_device(process_group, device)
    rank, num_ranks = group_rank(process_group), group_size(process_group)

    def total(of_this_rank: Tensor) -> Tensor:
        whole = of_this_rank.to(where)
        all_reduce(whole, process_group)
        return whole

    numbers = torch.zeros(2 + num_ranks, dtype=torch.int64)
    numbers[0], numbers[1] = sum(one.numel() for one in tensors), sum(one.itemsize > 4 for one in tensors)
    numbers[2 + rank] = k
    num_numbers, num_wide, *ks = total(numbers).tolist()
    if len(set(ks)) > 1:
        raise ValueError(f"k must be the same on all ranks, but by rank it is {ks}")
    if not 0 <= k <= num_numbers:
        raise ValueError(f"k={k} is not allowed: all ranks together have {num_numbers} numbers")
    if k == 0:
        return [torch.zeros_like(one, dtype=torch.bool) for one in tensors]

    patterns = [_bit_pattern(one, is_wide=num_wide > 0) for one in tensors]
    threshold, missing = 0, k  # how many of those that agree with the threshold so far are kept
    bits = 63 if num_wide else 31
    while bits:
        width = min(_DIGIT_BITS, bits)
        bits -= width
        counts = torch.zeros(2**width, dtype=torch.int64, device=device)
        for pattern in patterns:
            digits = pattern[(pattern >> (bits + width)) == threshold] >> bits
            counts += (digits & (2**width - 1)).bincount(minlength=2**width)
        from_top = total(counts).flip(0).cumsum(0).tolist()
        place = next(place for place, count in enumerate(from_top) if count >= missing)
        missing -= from_top[place - 1] if place else 0
        threshold = threshold << width | (2**width - 1 - place)

    ties = torch.zeros(num_ranks, dtype=torch.int64)
    ties[rank] = sum(int((one == threshold).sum()) for one in patterns)
    missing -= int(total(ties)[:rank].sum())
    masks = []
    for pattern, tensor in zip(patterns, tensors, strict=True):
        is_tie = pattern == threshold
        masks.append(((pattern > threshold) | (is_tie & (is_tie.cumsum(0) <= missing))).view(tensor.shape))
        missing -= int(is_tie.sum())
    return masks


def _bit_pattern(tensor: Tensor, is_wide: bool) -> Tensor:
    """Flat whole numbers that are ordered as the magnitudes are."""
    magnitudes = tensor.detach().abs().flatten()
    return magnitudes.double().view(torch.int64) if is_wide else magnitudes.float().view(torch.int32)
