"""What else must hold of a divided model: ties, accumulated gradients, the norm of a clipping, a reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.checks.divided import Part
from zeroresize.checks.finding import BACKWARDS, NORM, TIE, ParallelFinding, finding
from zeroresize.checks.gradient_checks import gradient_of
from zeroresize.resharding.ranks import Ranks
from zeroresize.utils.torch_private import is_dtensor


def find_broken_ties(
    model: nn.Module,
    reference: nn.Module | None,
    parts: Sequence[Part],
    gradients: Mapping[str, Tensor | None],
    ranks: Ranks,
    tolerance: float,
) -> list[ParallelFinding]:
    """Find parameters that should be tied, or are equal as tied ones are, and have different gradients.

    Args:
        parts: with their values as they are in training.
        gradients: what this rank holds of them.
    """
    declared = {frozenset(pair) for pair in [*_tied_in(model), *([] if reference is None else _tied_in(reference))]}
    groups: dict[Any, list[Part]] = {}
    shapes: dict[str, list[int]] = ranks.share({part.name: list(part.local.shape) for part in parts})[0]
    for part in parts:
        groups.setdefault(str(shapes[part.name]), []).append(part)
    pairs = [pair for group in groups.values() for pair in itertools.combinations(group, 2)]
    suspects = []
    for first, second in pairs:
        is_equal = first.local.shape == second.local.shape and torch.equal(first.local, second.local)
        has_values = not first.is_constant and is_equal
        mine, other = (gradients.get(one.name) for one in (first, second))
        differs = mine is not None and other is not None and mine.shape == other.shape
        differs = differs and float((mine - other).norm()) > tolerance * float(mine.norm())  # type: ignore[operator, union-attr]
        suspects.append([has_values, differs])
    findings = []
    for (first, second), *rows in zip(pairs, *ranks.share(suspects), strict=True):
        is_declared = frozenset((first.name, second.name)) in declared
        is_equal = all(row[0] for row in rows) and not _are_clones(first.name, second.name, parts)
        if (is_declared or is_equal) and any(row[1] for row in rows):
            how = "the model says that they are one" if is_declared else "they are bitwise equal"
            detail = f"{second.name} and {first.name} are two parameters with other gradients, and {how}"
            findings.append(finding(TIE, detail, parameter=second.name, operation="tie"))
    return findings


def _tied_in(model: nn.Module) -> list[tuple[str, str]]:
    """Return pairs of names of parameters that a model holds as one, or that transformers' keys say are one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    pairs = [pair for same in names.values() for pair in itertools.combinations(same, 2)]
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False) and hasattr(model, "get_input_embeddings"):
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[operator]
        named = [name for end in ends for name, one in model.named_modules() if one is end]
        pairs += itertools.combinations([f"{name}.weight" for name in named], 2)
    return pairs


def _are_clones(first: str, second: str, parts: Sequence[Part]) -> bool:
    """Whether two parameters are of modules that are equal altogether, as layers that begin as copies of one."""
    ends = first.split("."), second.split(".")
    at = next(place for place, (one, other) in enumerate(zip(*ends, strict=False)) if one != other)
    roots = [".".join(end[: at + 1]) + "." for end in ends]
    inside = [{one.name.removeprefix(root): one for one in parts if one.name.startswith(root)} for root in roots]
    varied = [name for name, one in inside[0].items() if not one.is_constant]
    return len(varied) > 1 and all(
        name in inside[1]
        and inside[1][name].local.shape == inside[0][name].local.shape
        and torch.equal(inside[1][name].local, inside[0][name].local)
        for name in varied
    )


def find_backwards_that_do_not_add_up(
    parts: Sequence[Part],
    single: Mapping[str, Tensor | None],
    double: Mapping[str, Tensor | None],
    ranks: Ranks,
    tolerance: float,
) -> list[ParallelFinding]:
    """Find parameters whose gradient after two backwards of one batch is not twice that after one."""
    ratios = {}
    norms = {name: float(one.norm()) for name, one in single.items() if one is not None}
    least = 1e-6 * max(norms.values(), default=0.0)
    for part in parts:
        first, both = single[part.name], double[part.name]
        if first is None or both is None or norms[part.name] <= least:  # only rounding, as of a bias of keys
            continue
        if float((both - 2.0 * first).norm()) > tolerance * norms[part.name]:
            ratios[part.name] = float(both.norm()) / norms[part.name]
    of_ranks = ranks.share(ratios)
    return [
        finding(
            BACKWARDS,
            f"after two backwards of one batch its gradient has {table[name]:.4g} times the norm of that after one",
            parameter=name,
            operation="hook on the gradient",
        )
        for table in of_ranks
        for name in table
        if table is next(one for one in of_ranks if name in one)
    ]


def find_other_norm(
    model: Any,
    clip: Callable[[Any], Any],
    originals: Mapping[str, Tensor],
    parts: Sequence[Part],
    gradients: Mapping[str, Tensor],
    ranks: Ranks,
) -> list[ParallelFinding]:
    """Find whether a host's clipping takes another norm than that of all gradients of the undivided model.

    Args:
        model: as the user has it, outside of what computes apart.
        originals: its parameters by name.
        gradients: of the model, which its parameters are given meanwhile.
    """

    def norms(only: Part | None) -> tuple[float, float]:
        square = 0.0
        for part in parts:
            gradient = gradients.get(part.name)
            if gradient is None:
                continue
            given = gradient.detach().to(originals[part.name].dtype).clone()
            originals[part.name].grad = given if only in (None, part) else given * 0.0
            local = gradient_of(part, originals[part.name].grad)
            assert local is not None
            squares = ranks.share(float(local.double().square().sum()))
            square += sum(squares) if part.is_shard else squares[0]
        norm = clip(model)
        norm = norm.full_tensor() if is_dtensor(norm) else norm
        return float(norm), square**0.5

    def is_wrong(pair: Sequence[float]) -> bool:
        return not abs(pair[0] - pair[1]) <= 1e-2 * pair[1]

    of_ranks = ranks.share(ranks.together(lambda: norms(None)))
    if not any(map(is_wrong, of_ranks)):
        return []
    of_shards = {
        part.name: ranks.share(ranks.together(lambda part=part: norms(part)))  # type: ignore[misc]
        for part in parts
        if part.is_shard and part.name in gradients
    }
    of_shards = {name: rows for name, rows in of_shards.items() if rows[0][1] > 1e-3 * of_ranks[0][1]}
    wrong = [name for name, rows in of_shards.items() if any(map(is_wrong, rows))]
    name = wrong[0] if wrong and len(wrong) < len(of_shards) else ""
    detail = f"it is {of_ranks[0][0]:.6g} on rank 0, and that of the undivided gradients {of_ranks[0][1]:.6g}"
    if name:
        detail += f"; it miscounts {', '.join(wrong[:4])}{', …' if wrong[4:] else ''}"
    return [finding(NORM, detail, parameter=name, operation="clip")]
