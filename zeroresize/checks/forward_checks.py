"""What must hold of a forward over ranks, whatever model it is: what they hold alike stays alike, sums count once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.checks.apart import Apart
from zeroresize.checks.divided import Part
from zeroresize.checks.finding import ACTIVATIONS, DRAWS, LATER, PACKED, SUM, ParallelFinding, finding
from zeroresize.checks.recording import Event, Recorder, are_all_alike
from zeroresize.layers.local_parts import local_of
from zeroresize.resharding.ranks import Ranks
from zeroresize.utils.torch_private import is_dtensor
from zeroresize.utils.torch_state import tensors_in


def find_differing_activations(
    events: Sequence[Event], model: nn.Module, parts: Sequence[Part], tolerance: float
) -> list[ParallelFinding]:
    """Find modules without shards, and draws of random numbers, that make of what is alike what is not."""
    shards = {id(part.tensor) for part in parts if part.is_shard}
    divided = {""} | {
        name for name, module in model.named_modules() if any(id(each) in shards for each in module.parameters())
    }
    findings: list[ParallelFinding] = []
    for at, event in enumerate(events):
        is_known = any(_is_in(each.layer, event.module) for each in findings)
        if (event.operation or event.module not in divided) and not is_known and event.parts_ways(tolerance):
            findings.append(_differing(events, at))
    return findings


def find_where_ranks_part(events: Sequence[Event], tolerance: float) -> ParallelFinding:
    """Find the last module that returns the same on all ranks, where their losses differ and none parts ways."""
    calls = [event for event in events if not event.operation and event.outputs[0]]
    alike = [event.module for event in calls if are_all_alike(event.outputs, tolerance)]
    after = f"; {alike[-1]} is the last module that returns the same" if alike else ""
    return finding(ACTIVATIONS, f"the ranks' losses differ{after}", operation="loss")


def _differing(events: Sequence[Event], at: int) -> ParallelFinding:
    """The finding of an event that parts ways, by draws within it where there are some."""
    event = events[at]
    inside = [each.operation for each in events[:at] if each.operation and _is_in(each.module, event.module)]
    draws = [event.operation] if event.operation else inside
    norms = [f"{row[0][3]:.6g} on rank {rank}" for rank, row in enumerate(event.outputs[:4]) if row]
    what = f"{event.operation or 'it'} reads the same on all ranks and returns tensors of norm {', '.join(norms)}"
    return finding(DRAWS if draws else ACTIVATIONS, what, layer=event.module, operation=[*draws, "forward"][0])


def _is_in(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def find_wrong_sums(model: nn.Module, recorder: Recorder, ranks: Ranks, tolerance: float) -> list[ParallelFinding]:
    """Find row-parallel layers that return another thing than the sum of all ranks' products, and one bias."""
    findings = []
    modules: dict[str, Any] = dict(model.named_modules())
    for name in sorted(set.intersection(*map(set, ranks.share(list(recorder.rows))))):
        distance = ranks.together(lambda name=name: _error_of_sum(modules[name], *recorder.rows[name], ranks))  # type: ignore[misc]
        distances = ranks.share(distance)
        if max(distances) > tolerance:
            what = "of its largest element from the products of all ranks, and the bias, summed once"
            findings.append(finding(SUM, f"y differs by {max(distances):.1e} {what}", layer=name, operation="sum of y"))
    return findings


def _error_of_sum(module: Any, x: Tensor, y: Tensor, is_in_tuple: bool, ranks: Ranks) -> float:
    """Of the largest element; 0 where what each rank has is of another part of the sequence."""
    weight, x = local_of(module.weight).detach(), local_of(x)
    if getattr(module, "weight_is_transposed", "Conv1D" in type(module).__name__):
        weight = weight.t()
    columns = ranks.share(weight.shape[1])
    if x.shape[-1] == sum(columns):
        x = x.split(columns, -1)[ranks.rank]
    fits = x.shape[-1] == weight.shape[1]
    product = x.to(weight.dtype) @ weight.t() if fits else torch.zeros(())
    shapes = ranks.share(list(product.shape))
    if product.ndim == 0 or any(shape != shapes[0] for shape in shapes):
        return 0.0
    total = ranks.sum(product)
    whole: Tensor = y.full_tensor() if is_dtensor(y) else y  # type: ignore[attr-defined]
    if whole.shape != total.shape:
        dims = [dim for dim in range(whole.ndim) if whole.ndim == total.ndim and whole.shape[dim] != total.shape[dim]]
        if len(dims) != 1 or whole.shape[dims[0]] * ranks.size != total.shape[dims[0]]:
            return 0.0
        total = total.chunk(ranks.size, dims[0])[ranks.rank]
    bias = getattr(module, "bias", None)
    bias = getattr(module, "_bias", None) if bias is None else bias  # where transformers 4 keeps it
    expected = [total if bias is None else total + local_of(bias).detach(), *([total] if is_in_tuple else [])]
    return min(float((whole - each).abs().max()) for each in expected) / (float(expected[0].abs().max()) or 1.0)


def find_cut_packed_weights(model: nn.Module, recorder: Recorder, ranks: Ranks) -> list[ParallelFinding]:
    """Find column-parallel layers whose output a forward cuts at other features than their weights were cut at."""
    wrong = {}
    for name, blocks in recorder.blocks.items():
        layer: Any = model.get_submodule(name)
        parts = tuple(getattr(layer, "parts", None) or ())
        size = local_of(layer.weight).shape[0]
        ends = {0, *(end * size // sum(parts) for end in itertools.accumulate(parts))}
        by = next((by for block, by in blocks.items() if len(parts) < 2 or not _is_part(block, blocks, ends)), None)
        if by is not None:
            how = f"was cut as parts={parts}" if len(parts) > 1 else "was cut as a whole"
            what = f"{by}() cuts what it returns into other blocks than a rank holds of its weight, which {how}"
            wrong[name] = by, what
    return [
        finding(PACKED, what, parameter=f"{name}.weight", operation=by)
        for name, (by, what) in ranks.share(wrong)[0].items()
    ]


def _is_part(block: tuple[int, int], blocks: Iterable[tuple[int, int]], ends: set[int]) -> bool:
    """Whether a block is one part of a weight, or several that are cut further."""
    begin, end = block
    is_cut_further = any(begin <= a and b <= end and (a, b) != block for a, b in blocks)
    return ends >= {begin, end} and (is_cut_further or not any(begin < each < end for each in ends))


def find_later_tokens(apart: Apart, tolerance: float) -> list[ParallelFinding]:
    """Find whether outputs of a causal model change with tokens that come later."""
    seen = how_much_later_tokens_change(apart)
    detail = f"with other tokens in the second half outputs of the first half change by {seen:.1e} of their largest"
    return [finding(LATER, detail, operation="attention")] if seen > tolerance else []


def how_much_later_tokens_change(apart: Apart) -> float:
    """Return by how much outputs before the middle of a sequence change with the tokens after it; 0 where none are."""
    outputs: list[list[Tensor]] = []
    lengths: list[int] = []

    def exchange(module: nn.Module, args: Any, kwargs: Any) -> Any:
        named = "input_ids" in kwargs
        words = kwargs["input_ids"] if named else next(iter(args), None)
        if not isinstance(words, Tensor) or words.is_floating_point() or words.ndim != 2 or words.shape[1] < 2:
            return None
        lengths.append(words.shape[1])
        if len(lengths) == 2:
            words = words.clone()
            later = words[:, words.shape[1] // 2 :]
            later.copy_(torch.where(later == words.flatten()[0], words.max(), words.flatten()[0]))
        return (args, {**kwargs, "input_ids": words}) if named else ((words, *args[1:]), kwargs)

    def note(module: nn.Module, args: Any, output: Any) -> None:
        tensors = [local_of(each).detach() for each in tensors_in(output)]
        outputs.append([each for each in tensors if each.is_floating_point() and each.ndim == 3])

    for _ in range(2):  # after each forward modules hold what they held before, so that hooks go by themselves
        apart.inner.register_forward_pre_hook(exchange, prepend=True, with_kwargs=True)
        apart.inner.register_forward_hook(note)
        apart.forward()
    largest = 0.0
    for before, after in zip(*outputs[:2], strict=False) if len(lengths) == 2 else ():
        steps, size = before.shape[1], apart.ranks.size
        first = apart.ranks.rank * steps if steps * size == lengths[0] else 0  # of a divided sequence
        if steps in (lengths[0], lengths[0] / size):
            difference = (before - after)[:, : max(lengths[0] // 2 - first, 0)].abs()
            largest = max(largest, float(difference.max() / before.abs().max()) if difference.numel() else 0.0)
    return max(apart.ranks.share(largest))
