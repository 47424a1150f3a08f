"""Whether ranks that each compute a part of a batch have, weighed by what they count, the gradient of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroresize.checks.apart import Apart
from zeroresize.checks.finding import BATCH, ParallelFinding, finding
from zeroresize.checks.recording import Recorder
from zeroresize.utils.torch_private import BatchNorm, map_leaves
from zeroresize.utils.torch_state import tensors_in

#: A parameter's gradient is compared with this part of the largest one's norm at least.
_SMALL = 1e-3


def find_other_gradients(
    apart: Apart, counts: Sequence[int], counted: Callable[[Any], float] | None, tolerance: float
) -> list[ParallelFinding]:
    """Compare both gradients; in ``eval()`` but for batch norm where random numbers are drawn."""
    ranks, model, whole, total = apart.ranks, apart.inner, apart.batch, sum(counts)
    count, end = counts[ranks.rank], sum(counts[: ranks.rank + 1])
    rows = slice(end - count, end) if count else slice(1)  # a rank without samples computes one that does not count

    def cut(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == total else leaf

    def weigh() -> tuple[Any, float]:
        if not any(tensor.ndim and len(tensor) == total for tensor in tensors_in(whole)):
            raise ValueError(f"counts={list(counts)}: no tensor of the batch has {total} rows")
        part = map_leaves(cut, whole)
        return part, float(counted(part) if counted is not None and count else count)

    part, mine = ranks.together(weigh)
    share = mine / sum(ranks.share(mine))
    norms = {name: each for name, each in model.named_modules() if isinstance(each, BatchNorm) and each.training}
    apart.recorded(recorder := Recorder(model, ranks))
    if any(ranks.share(any(operation for _, operation, *_ in recorder.events.values()))):
        for module in {*model.modules()} - {*norms.values()}:
            module.training = False

    def gradients(batch: Any, weight: float) -> dict[str, Tensor]:
        apart.remember()
        apart.batch, apart.weight = batch, weight
        _, known = apart.gradients()
        given = known if weight else {}  # which 0 · NaN would not be
        return {name: given.get(name, torch.zeros_like(each)) for name, each in model.named_parameters()}

    def farthest() -> tuple[float, str]:
        of_parts, of_whole = gradients(part, share), gradients(whole, 1.0)
        least = max(_SMALL * max(float(each.norm()) for each in of_whole.values()), torch.finfo(apart.dtype).tiny)
        off = []
        for name, each in of_whole.items():
            difference = (ranks.sum(of_parts[name]) - each).norm() / each.norm().clamp(min=least)
            off.append((float(difference.nan_to_num(nan=torch.inf)), name))
        distance, name = ranks.share(max(off))[0]
        return distance, name

    distance, name = farthest()
    if distance <= tolerance:
        return []
    for norm in norms.values():
        norm.training = False
    is_of_norms = bool(norms) and farthest()[0] <= tolerance
    layer, operation = (next(iter(norms)), "batch norm") if is_of_norms else ("", recorder.loss)
    detail = f"in parts of {list(counts)} samples it is off by {distance:.1e} of that of the whole batch"
    return [finding(BATCH, detail, parameter=name, layer=layer, operation=operation)]
