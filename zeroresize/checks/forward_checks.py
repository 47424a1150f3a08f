"""What must hold of a forward over ranks, whatever model it is: what they hold alike stays alike, sums count once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.checks.apart import Apart
from zeroresize.checks.divided import Part, kind_of_layer
from zeroresize.checks.finding import ACTIVATIONS, DRAWS, LATER, PACKED, SUM, ParallelFinding, finding
from zeroresize.checks.recording import Event, Numbers, Recorder, tensors_in
from zeroresize.layers.local_parts import local_of
from zeroresize.resharding.ranks import Ranks
from zeroresize.utils.torch_private import is_dtensor


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
        is_judged = event.operation or event.module not in divided
        if (
            not is_judged
            or not _parts_ways(event, tolerance)
            or any(_is_in(one.layer, event.module) for one in findings)
        ):
            continue
        draws = [event.operation] if event.operation else _draws_within(events[:at], event.module)
        what = f"{event.operation or 'it'} reads the same on all ranks and returns {_figures(event.outputs)}"
        cause = DRAWS if draws else ACTIVATIONS
        findings.append(finding(cause, what, layer=event.module, operation=draws[-1] if draws else "forward"))
    return findings


def find_where_ranks_part(events: Sequence[Event], model: nn.Module, tolerance: float) -> ParallelFinding:
    """Find the module after which nothing is alike on all ranks, where their losses differ."""
    modules = dict(model.named_modules())
    weighty = {name for name, one in modules.items() if next(one.parameters(), None) is not None}
    calls = [(at, event) for at, event in enumerate(events) if not event.operation]
    alike = [
        at
        for at, each in calls
        if each.module in weighty and each.outputs[0] and each.is_alike(each.outputs, tolerance)
    ]
    after = max(alike, default=-1)
    for at, event in calls:
        if at > after and _parts_ways(event, tolerance) and not kind_of_layer(modules[event.module]):
            draws = _draws_within(events[:at], event.module)
            what = f"it reads the same on all ranks and returns {_figures(event.outputs)}, and so their losses differ"
            operation = draws[-1] if draws else "forward"
            return finding(DRAWS if draws else ACTIVATIONS, what, layer=event.module, operation=operation)
    return finding(ACTIVATIONS, "the ranks' losses differ", operation="loss")


def find_wrong_sums(model: nn.Module, recorder: Recorder, ranks: Ranks, tolerance: float) -> list[ParallelFinding]:
    """Find row-parallel layers and divided embeddings that return another thing than the sum of all ranks' parts."""
    findings = []
    modules: dict[str, Any] = dict(model.named_modules())
    for name in sorted(set.intersection(*map(set, ranks.share(list(recorder.rows))))):
        detail = ranks.together(lambda name=name: _wrong_sum(modules[name], *recorder.rows[name], ranks, tolerance))  # type: ignore[misc]
        details = [one for one in ranks.share(detail) if one]
        if details:
            operation = "bias" if details[0].startswith("the bias") else "all-reduce of y"
            findings.append(finding(SUM, details[0], layer=name, operation=operation))
    return findings


def _wrong_sum(module: Any, x: Tensor, y: Tensor | None, is_in_tuple: bool, ranks: Ranks, tolerance: float) -> str:
    weight, x = local_of(module.weight).detach(), local_of(x)
    if kind_of_layer(module) == "embedding":
        if "VocabParallel" not in type(module).__name__ and type(module).forward is not nn.Embedding.forward:
            return ""  # it scales what it looks up
        rows = ranks.share(len(weight))
        ids = x - sum(rows[: ranks.rank])
        is_here = (ids >= 0) & (ids < len(weight))
        product = weight[ids.clamp(0, len(weight) - 1)] * is_here[..., None]
    else:
        if getattr(module, "weight_is_transposed", "Conv1D" in type(module).__name__):
            weight = weight.t()
        columns = ranks.share(weight.shape[1])
        if x.shape[-1] == sum(columns):
            x = x.split(columns, -1)[ranks.rank]
        fits = x.shape[-1] == weight.shape[1]
        product = x.to(weight.dtype) @ weight.t() if fits else torch.zeros(())
    if y is None or len({str(one) for one in ranks.share([list(product.shape), x.ndim])}) > 1 or product.ndim == 0:
        return ""  # of a sequence of which each rank has another part
    total = ranks.sum(product)
    bias = getattr(module, "bias", None)
    bias = getattr(module, "_bias", None) if bias is None else bias  # where transformers 4 keeps it
    bias = None if bias is None or kind_of_layer(module) == "embedding" else local_of(bias).detach()
    whole: Tensor = y.full_tensor() if is_dtensor(y) else y  # type: ignore[attr-defined]
    if whole.shape != total.shape:
        dims = [dim for dim in range(whole.ndim) if whole.ndim == total.ndim and whole.shape[dim] != total.shape[dim]]
        if len(dims) != 1 or whole.shape[dims[0]] * ranks.size != total.shape[dims[0]]:
            return ""
        total = total.chunk(ranks.size, dims[0])[ranks.rank]
    expected = total if bias is None else total + bias
    largest = float(expected.abs().max()) or 1.0

    def distance(other: Tensor) -> float:
        return float((whole - other).abs().max()) / largest

    if distance(expected) <= tolerance or (is_in_tuple and distance(total) <= tolerance):
        return ""
    if bias is not None:
        times = float(((whole - total) * bias).sum() / (bias.square().sum() * (whole.numel() / bias.numel())))
        if distance(total + times * bias) <= tolerance:
            return f"the bias is in y {times:.3g} times, not once"
    return f"y differs by {distance(expected):.1e} of its largest element from the products of all ranks summed once"


def find_cut_packed_weights(recorder: Recorder, ranks: Ranks) -> list[ParallelFinding]:
    """Find column-parallel layers cut as a whole whose output a forward cuts into parts that the weight has packed."""
    return [
        finding(
            PACKED,
            f"what it returns is cut by {function}(), so its weight holds several parts one after the other, and each "
            "rank has contiguous rows of all of them",
            parameter=f"{name}.weight",
            operation=function,
        )
        for name, function in ranks.share(recorder.cuts)[0].items()
    ]


def find_later_tokens(apart: Apart, tolerance: float) -> list[ParallelFinding]:
    """Find whether outputs of a causal model change with tokens that come later."""
    seen = how_much_later_tokens_change(apart)
    if seen <= tolerance:
        return []
    detail = f"with other tokens in the second half outputs of the first half change by {seen:.1e} of their largest"
    return [finding(LATER, detail, layer="", operation="attention")]


def how_much_later_tokens_change(apart: Apart) -> float:
    """Return by how much outputs before the middle of a sequence change with the tokens after it; 0 where none are."""
    outputs: list[Any] = []
    lengths: list[int] = []

    def exchange(module: nn.Module, args: Any, kwargs: Any) -> Any:
        named = "input_ids" in kwargs
        words = kwargs["input_ids"] if named else next(iter(args), None)
        if not isinstance(words, Tensor) or words.is_floating_point() or words.ndim != 2 or words.shape[1] < 2:
            return None
        lengths.append(words.shape[1])
        if len(lengths) == 1:
            return None
        words = words.clone()
        later = words[:, words.shape[1] // 2 :]
        later.copy_(torch.where(later == words.flatten()[0], words.max(), words.flatten()[0]))
        return (args, {**kwargs, "input_ids": words}) if named else ((words, *args[1:]), kwargs)

    for _ in range(2):
        handles = [
            apart.inner.register_forward_pre_hook(exchange, prepend=True, with_kwargs=True),
            apart.inner.register_forward_hook(lambda module, args, output: outputs.append(output)),
        ]
        try:
            apart.forward()
        finally:
            for handle in handles:
                handle.remove()
    changes = []
    for before, after in zip(*map(_floating, outputs[:2]), strict=False) if len(lengths) == 2 else ():
        steps = before.shape[1] if before.ndim == 3 else 0
        first = apart.ranks.rank * steps if steps * apart.ranks.size == lengths[0] and steps else 0
        if steps and (first or steps == lengths[0] or steps * apart.ranks.size == lengths[0]):
            until = max(lengths[0] // 2 - first, 0)
            difference = (before - after)[:, :until].abs()
            changes.append(float(difference.max() / before.abs().max()) if difference.numel() else 0.0)
    return max(apart.ranks.share(max(changes, default=0.0)))


def _floating(output: Any) -> list[Tensor]:
    return [local_of(one).detach() for one in tensors_in(output) if one.is_floating_point()]


def _parts_ways(event: Event, tolerance: float) -> bool:
    """Whether something that reads the same on all ranks returns other values of one shape."""
    return (
        bool(event.inputs[0] and event.outputs[0])
        and any(row[0] for row in event.inputs[0])
        and event.is_alike(event.inputs, tolerance)
        and not event.is_alike(event.outputs, tolerance)
        and not event.is_divided
    )


def _draws_within(events: Sequence[Event], module: str) -> list[str]:
    return [one.operation for one in events if one.operation and _is_in(one.module, module)]


def _is_in(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _figures(outputs: Sequence[Numbers]) -> str:
    norms = [f"{row[0][3]:.6g} on rank {rank}" for rank, row in enumerate(outputs) if row]
    sums = [f"{row[0][1] + row[0][2]:.6g} on rank {rank}" for rank, row in enumerate(outputs) if row]
    return f"tensors of norm {', '.join(norms[:4])} and of sum {', '.join(sums[:4])}"
