"""What else must hold of a divided model: ties, accumulated gradients, the norm of a clipping."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroresize.checks.apart import number_of
from zeroresize.checks.divided import Part
from zeroresize.checks.finding import BACKWARDS, NORM, TIE, ParallelFinding, finding
from zeroresize.checks.gradient_checks import local_gradients
from zeroresize.layers.splitting import probably_untied
from zeroresize.resharding.ranks import Ranks


def find_broken_ties(
    model: nn.Module, reference: nn.Module | None, gradients: Mapping[str, Tensor], ranks: Ranks, tolerance: float
) -> list[ParallelFinding]:
    """Find parameters that should be tied, or are equal as embeddings that were tied, and have different gradients.

    Args:
        gradients: what this rank holds of them.
    """
    reasons = dict.fromkeys(_declared_ties(model, reference), "the model says that they are one")
    for pair in probably_untied(model, are_divided=False):
        reasons.setdefault(pair, "they are bitwise equal")
    findings = []
    for first, second in sorted(set.intersection(*(set(map(tuple, pairs)) for pairs in ranks.share(list(reasons))))):
        if any(ranks.share(_are_different(gradients.get(first), gradients.get(second), tolerance))):
            detail = f"{second} and {first} are two parameters with other gradients, and {reasons[first, second]}"
            findings.append(finding(TIE, detail, parameter=second, operation="tie"))
    return findings


def _declared_ties(model: nn.Module, reference: nn.Module | None) -> list[tuple[str, str]]:
    """Return pairs of names of parameters that a reference holds as one, or that transformers' keys say are one."""
    names = defaultdict[int, list[str]](list)
    for name, parameter in () if reference is None else reference.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False) and hasattr(model, "get_input_embeddings"):
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[operator]
        names[0] = [f"{name}.weight" for end in ends for name, module in model.named_modules() if module is end]
    return [pair for same in names.values() for pair in itertools.combinations(same, 2)]


def _are_different(first: Tensor | None, other: Tensor | None, tolerance: float) -> bool:
    if first is None or other is None:
        return False
    return first.shape != other.shape or float((first - other).norm()) > tolerance * float(first.norm())


def find_backwards_that_do_not_add_up(
    single: Mapping[str, Tensor], double: Mapping[str, Tensor], ranks: Ranks, tolerance: float
) -> list[ParallelFinding]:
    """Find parameters whose gradient after two backwards of one batch is not twice that after one."""
    norms = {name: float(gradient.norm()) for name, gradient in single.items()}
    least = 1e-6 * max(norms.values(), default=0.0)  # only rounding, as of a bias of keys
    ratios = {
        name: float(double[name].norm()) / norm
        for name, norm in norms.items()
        if norm > least and name in double and float((double[name] - 2.0 * single[name]).norm()) > tolerance * norm
    }
    seen: dict[str, float] = {}
    for of_rank in ranks.share(ratios):
        seen = {**of_rank, **seen}
    what = "after two backwards of one batch its gradient has {:.4g} times the norm of that after one"
    operation = "hook on the gradient"
    return [finding(BACKWARDS, what.format(ratio), parameter=name, operation=operation) for name, ratio in seen.items()]


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
    for name, gradient in gradients.items():
        originals[name].grad = gradient.detach().to(originals[name].dtype).clone()
    held = local_gradients(parts, {name: originals[name].grad for name in gradients})  # type: ignore[misc]
    of_ranks = ranks.share({name: float(gradient.double().square().sum()) for name, gradient in held.items()})
    of_parts = {part.name: [squares.get(part.name, 0.0) for squares in of_ranks] for part in parts}
    expected = sum(sum(of_parts[part.name]) if part.is_shard else of_parts[part.name][0] for part in parts) ** 0.5
    norms = ranks.share(ranks.together(lambda: number_of(torch.as_tensor(clip(model)))))
    if all(abs(norm - expected) <= 1e-2 * expected for norm in norms):
        return []
    detail = f"it is {norms[0]:.6g} on rank 0, and that of the undivided gradients {expected:.6g}"
    return [finding(NORM, detail, operation="clip")]
