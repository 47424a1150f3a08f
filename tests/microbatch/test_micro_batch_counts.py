"""Planned micro-batches train by the mean over all counted tokens, whatever the loss says."""

import pytest
import torch
import torch.nn.functional as F
from helpers.micro_batches import MAKE, SIZES, LocalPlans, layers_of, planner_of, samples_of

from zeroresize.microbatch.padded import IGNORED
from zeroresize.microbatch.trainer import MicroBatchTrainer
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.microbatches.plan import MicroBatch
from zeroresize.strategy.model import SwitchableModel

pytestmark = pytest.mark.slow

#: Classes that do not count, besides padding.
UNCOUNTED = 9


def targets_of(batch):
    return batch.targets.masked_fill(batch.targets < UNCOUNTED, IGNORED).flatten()


def loss_of(**options):
    return lambda output, batch: F.cross_entropy(output.flatten(0, 1), targets_of(batch), **options)


def knowing(output, batch):
    assert float(output.detach().abs().max()) < 1e9
    return loss_of(reduction="sum")(output, batch), (targets_of(batch) != IGNORED).sum()


WEIGHT = torch.linspace(0.0, 2.0, 19, dtype=torch.float64)
#: The loss, and what it is of a whole batch; more of them are tested with strategies, by the same trainer.
CASES = [
    (loss_of(), loss_of()),
    (loss_of(weight=WEIGHT, reduction="sum"), loss_of(weight=WEIGHT)),
    (knowing, loss_of()),
]


def trainer_of(kind, group, loss, strategy, planner):
    model = SwitchableModel(layers_of(kind), strategies=[strategy], process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = {"batch_from": MAKE[kind][1].of, "hollow": MAKE[kind][1].hollow, "sizes": SIZES[kind]}
    return MicroBatchTrainer(model, optimizer, LocalPlans(planner), loss=loss, **make)


def undivided(kind, loss, samples, lengths_NA):
    layers = layers_of(kind)
    batch = MAKE[kind][1].of(samples, MicroBatch.of(range(len(samples)), lengths_NA))
    x = batch.inputs
    for layer in layers:
        x = layer(x, batch)
    value = loss(x, batch)
    value.backward()
    return value.item(), torch.stack([parameter.grad.norm() for parameter in layers.parameters()]).norm().item()


def masked_samples(lengths_NA):
    """Of every third sample nothing counts."""
    samples = samples_of("gpt", lengths_NA)
    return [sample % UNCOUNTED if number % 3 == 0 else sample for number, sample in enumerate(samples)]


@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_losses_count_as_undivided(run_ranks, degrees):
    strategy = Strategy(*degrees)

    def train(rank, group):
        for loss, expected in CASES:
            planner = planner_of("gpt", strategy, method="fixed", size=1)  # micro-batches of one sample
            trainer, lengths = trainer_of("gpt", group, loss, strategy, planner), planner.lengths_of(0)
            samples = masked_samples(lengths)
            value, norm = undivided("gpt", expected, samples, lengths)
            assert trainer.evaluate(samples, lengths, 20) == pytest.approx(value, rel=1e-10)
            report = trainer.step(samples, lengths)
            assert (report.loss, report.grad_norm) == pytest.approx((value, norm), rel=1e-10)

    run_ranks(train, 2)


def test_a_batch_that_counts_nothing_is_an_error_on_all_ranks(run_ranks):
    strategy = Strategy(pp=2)

    def train(rank, group):
        planner = planner_of("gpt", strategy)
        trainer, lengths = trainer_of("gpt", group, knowing, strategy, planner), planner.lengths_of(0)
        samples = [sample % UNCOUNTED for sample in samples_of("gpt", lengths)]
        for call in (lambda: trainer.evaluate(samples, lengths, 20), lambda: trainer.step(samples, lengths)):
            with pytest.raises(ValueError, match="there is no mean"):
                call()

    run_ranks(train, 2)
