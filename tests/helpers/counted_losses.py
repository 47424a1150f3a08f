"""Losses that count some targets, each beside the mean of the undivided model; outputs [B, V, T], targets [B, T]."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

WORDS = 7
_WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0, 0.25, 1.5], dtype=torch.float64)


class Case(NamedTuple):
    """A loss, and what it is of a whole batch."""

    loss: Any
    expected: Any
    count: Any = None


def flattened(outputs, targets, **options):
    return F.cross_entropy(outputs.transpose(1, 2).flatten(0, 1), targets.flatten(), **options)


class OddLoss(nn.Module):
    """Which does not say what it ignores, other than by what it returns."""

    ignore_index = -100

    def forward(self, outputs, targets):
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return losses.sum(), (targets != self.ignore_index).sum()


def knowing(outputs, targets):
    """The pair by a loss that looks at its outputs, so that they cannot be foreseen."""
    assert float(outputs.detach().abs().max()) < 1e9
    return OddLoss()(outputs, targets)


def looking(outputs, targets):
    assert len(outputs) == len(targets)
    return flattened(outputs, targets)


def of_mask(outputs, targets):
    losses, counts = F.cross_entropy(outputs, targets, reduction="none"), targets >= 0
    return losses[counts].sum() / counts.sum()


def of_probabilities(outputs, targets, **options):
    classes = F.one_hot(targets.clamp(min=0), WORDS).movedim(-1, 1).double()
    return F.cross_entropy(outputs, classes, weight=_WEIGHT, **options)


def counted(targets):
    return (targets >= 0).sum()


mean = F.cross_entropy
CASES = {
    "function": Case(F.cross_entropy, mean),
    "module": Case(nn.CrossEntropyLoss(), mean),
    "partial that sums": Case(functools.partial(F.cross_entropy, reduction="sum", ignore_index=-100), mean),
    "module that sums, in a function": Case(lambda *xs: nn.CrossEntropyLoss(reduction="sum")(*xs), mean),
    "weights": Case(nn.CrossEntropyLoss(_WEIGHT), functools.partial(mean, weight=_WEIGHT)),
    "weights and smoothing": Case(
        functools.partial(F.cross_entropy, weight=_WEIGHT, label_smoothing=0.2),
        functools.partial(mean, weight=_WEIGHT, label_smoothing=0.2),
    ),
    "likelihoods": Case(nn.NLLLoss(weight=_WEIGHT, reduction="sum"), functools.partial(F.nll_loss, weight=_WEIGHT)),
    "likelihoods by a function": Case(F.nll_loss, F.nll_loss),
    "flattened": Case(flattened, mean),
    "classes of positions that follow": Case(
        lambda outputs, targets: flattened(outputs[:, :, :-1], targets[:, 1:]),
        lambda outputs, targets: flattened(outputs[:, :, :-1], targets[:, 1:]),
    ),
    "sum and count": Case(OddLoss(), mean),
    "sum and count that only the loss knows": Case(knowing, mean),
    "seen when it is computed": Case(looking, mean),
    "a mean by the user's count": Case(of_mask, mean, counted),
    "probabilities": Case(functools.partial(of_probabilities, reduction="sum"), of_probabilities),
    "scaled, as a gradient scaler does": Case(
        lambda outputs, targets: F.cross_entropy(outputs, targets) * torch.tensor(4.0),
        lambda outputs, targets: mean(outputs, targets) * 4.0,
    ),
    "a part of several backwards": Case(
        lambda outputs, targets: flattened(outputs, targets) / 3, lambda outputs, targets: mean(outputs, targets) / 3
    ),
    "sum of squares": Case(
        lambda outputs, targets: F.mse_loss(outputs[:, 0], targets.double(), reduction="sum"),
        lambda outputs, targets: F.mse_loss(outputs[:, 0], targets.double()),
    ),
}


def masked(targets, first=2):
    """Targets [B, T] of which unequal numbers count, none of the first rows."""
    targets = targets.clone()
    targets[:first] = -100
    for row in range(first, len(targets)):
        targets[row, : row % targets.shape[1]] = -100
    return targets


def batch(seed, rows=8, length=5):
    """Words [B, T], and targets."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (2, rows, length), generator=generator)
    return words[0], masked(words[1])
