"""What counts in a loss is known from its targets, if torch's losses are in it, and looked at where it is not."""

import functools

import pytest
import torch
import torch.nn.functional as F
from helpers.counted_losses import CASES, WORDS, batch
from torch import nn

from zeroresize.runtime.counted_loss import CountedLoss, total_count

_, TARGETS = batch(0)
COUNTED = float((TARGETS >= 0).sum())
#: Of these torch's losses, and the user's count, only the targets are asked.
FORESEEN = {"function", "module", "partial that sums", "weights", "weights and smoothing", "likelihoods"}
FORESEEN |= {"likelihoods by a function", "a mean by the user's count"}


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_sum_to_the_mean_of_the_whole(name):
    loss = CountedLoss(CASES[name].loss, CASES[name].count, averages=True)
    outputs = torch.randn(8, WORDS, 5, dtype=torch.float64, requires_grad=True)
    expected = CASES[name].expected(outputs, TARGETS)
    parts = [slice(0, 2), slice(2, 3), slice(3, 8)]  # of the first nothing counts
    counts = loss.prepare([TARGETS[part] for part in parts], [2.0, 1.0, 5.0])
    assert loss.is_foreseen is (name in FORESEEN)
    loss.begin(total_count(counts))
    total = sum(loss(outputs[part], TARGETS[part]) for part in parts)
    factor = loss.total / loss.counted if loss.num_unforeseen else 1.0
    torch.testing.assert_close(total * factor, expected, rtol=1e-12, atol=0.0)
    (gradient,), (whole,) = (torch.autograd.grad(each, outputs) for each in (total * factor, expected))
    torch.testing.assert_close(gradient, whole, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize(
    ("loss", "targets", "count"),
    [
        (functools.partial(F.cross_entropy, size_average=False), TARGETS, COUNTED),
        (nn.CrossEntropyLoss(ignore_index=int(TARGETS[3, 4])), TARGETS.clamp(min=int(TARGETS[3, 4])), None),
        (F.cross_entropy, torch.tensor(3), 1.0),
        (F.cross_entropy, torch.rand(WORDS), 1.0),
        (F.cross_entropy, torch.rand(4, WORDS, 5), 20.0),
        (nn.BCEWithLogitsLoss(torch.rand(6)), torch.rand(4, 6), 24.0),
        (nn.L1Loss(), torch.rand(4, 6), 24.0),
    ],
)
def test_what_counts_is_that_of_torch(loss, targets, count):
    (foreseen,) = CountedLoss(loss, averages=True).prepare([targets], [-1.0])
    ignored = getattr(loss, "ignore_index", None)
    assert foreseen == (float((targets != ignored).sum()) if count is None else count)


@pytest.mark.parametrize(
    "loss",
    [
        functools.partial(F.cross_entropy, reduce=False),
        functools.partial(lambda outputs, targets, weight: F.cross_entropy(outputs, targets, weight), weight=None),
        lambda outputs, targets: F.cross_entropy(outputs, targets) + 0.1 * outputs.mean(),
        lambda outputs, targets: F.cross_entropy(outputs, targets) if outputs.sum() > 0 else outputs.sum(),
        lambda outputs, targets: sum(output.sum() for output in outputs),
        lambda outputs, targets: outputs.unknown,
    ],
)
def test_what_does_not_show_is_not_foreseen(loss):
    counted = CountedLoss(loss, averages=True)
    assert counted.prepare([TARGETS], [8.0]) == [8.0] and counted.is_foreseen is False


@pytest.mark.parametrize(
    ("loss", "count", "error"),
    [
        (F.cross_entropy, lambda targets: -1, "at least 0"),
        (
            F.cross_entropy,
            lambda targets: targets.mask,
            "count= fails for the targets of micro-batch 0: AttributeError",
        ),
        (F.cross_entropy, lambda targets: float("nan"), "at least 0"),
    ],
)
def test_counts_that_are_none_are_refused(loss, count, error):
    with pytest.raises(ValueError, match=error):
        CountedLoss(loss, count, averages=True).prepare([TARGETS, TARGETS[:1]], [8.0, 1.0])


def test_a_sum_and_a_count_that_were_exchanged_are_refused():
    counted = CountedLoss(lambda outputs, targets: (torch.ones(()), outputs.sum()), averages=True)
    counted.prepare([TARGETS], [8.0])
    counted.begin(8.0)
    with pytest.raises(ValueError, match=r"is it \(count, sum\)"):
        counted(torch.ones(8, WORDS, 5, requires_grad=True), TARGETS)
