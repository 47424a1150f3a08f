"""A loss that averages over the tokens of padded micro-batches is warned of once; one that sums is not."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.micro_batches import MAKE, SIZES, LocalPlans, layers_of, planner_of, samples_of
from helpers.processes import caught_log_lines

from lm_examples.microbatches.blocks import summed_loss
from zeroresize.microbatch.padded import PaddedBatch, PairBatch
from zeroresize.microbatch.row_halves import halves_of_rows, num_counted
from zeroresize.microbatch.trainer import MicroBatchTrainer
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.microbatches.micro_batch import MicroBatch
from zeroresize.strategy.loss_check import averages
from zeroresize.strategy.model import SwitchableModel


def mean_loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch.targets.flatten())


def is_average(loss, samples, microbatch, lengths, batch_from=PaddedBatch.of, gain=0.0, vocabulary=50):
    """``averages`` of outputs that know the target: ``gain`` 0 is an untrained model, 10 one without errors."""
    torch.manual_seed(0)
    batch = batch_from(samples, microbatch)
    output = torch.randn(*batch.targets.shape, vocabulary) * 0.1
    output.scatter_add_(-1, batch.targets.clamp(min=0)[..., None], torch.full_like(output[..., :1], gain))
    return averages(
        loss,
        loss(output, batch),
        num_counted(microbatch, lengths),
        lambda: halves_of_rows(output, microbatch, lengths, lambda half: batch_from(samples, half)),
    )


@pytest.mark.parametrize("gain", [0.0, 3.0, 10.0])
@pytest.mark.parametrize("lengths", [(9, 9), (4, 5, 7), (60, 61, 70, 90, 128)])
def test_an_average_is_known_by_its_halves(lengths, gain):
    lengths_NA = np.array(lengths)[:, None]
    samples = [torch.randint(50, (length + 1,)) for length in lengths]
    microbatch = MicroBatch.of(range(len(lengths)), lengths_NA)
    assert is_average(mean_loss, samples, microbatch, lengths_NA, gain=gain)
    assert not is_average(summed_loss, samples, microbatch, lengths_NA, gain=gain)


def test_an_average_is_known_of_pairs_and_of_several_samples_in_a_row():
    pairs = np.array([(5, 9), (40, 3), (2, 6)])
    samples = [tuple(torch.randint(50, (length,)) for length in pair) for pair in pairs]
    microbatch = MicroBatch.of([2, 0, 1], pairs)
    assert is_average(mean_loss, samples, microbatch, pairs, PairBatch.of)
    assert is_average(summed_loss, samples, microbatch, pairs, PairBatch.of) is False
    lengths_NA = np.array([(3,), (9,), (4,)])
    samples = [torch.randint(50, (length + 1,)) for (length,) in lengths_NA]
    assert is_average(mean_loss, samples, MicroBatch(((0, 2), (1,)), (10,)), lengths_NA)


def test_what_cannot_be_told_is_no_average():
    lengths_NA = np.array([(9,), (7,)])
    samples = [torch.randint(50, (length + 1,)) for (length,) in lengths_NA]
    both, single = MicroBatch.of([0, 1], lengths_NA), MicroBatch.of([0], lengths_NA)

    def of_whole_only(output, batch):
        if len(output) < 2:
            raise IndexError("wants 2 rows")
        return mean_loss(output, batch)

    def halves_of_long_outputs():  # [rows, length, V] is needed
        return halves_of_rows(torch.zeros(2, 8, 50), both, lengths_NA, lambda half: PaddedBatch.of(samples, half))

    assert is_average(of_whole_only, samples, both, lengths_NA) is None
    assert is_average(mean_loss, samples, single, lengths_NA) is None
    assert averages(mean_loss, torch.tensor(0.1), 16, halves_of_long_outputs) is None
    assert averages(mean_loss, torch.tensor(0.1), 16, lambda: halves_of_rows((), both, lengths_NA, None)) is None


@pytest.mark.parametrize("kind", ["gpt", "t5"])
@pytest.mark.parametrize("loss", [mean_loss, summed_loss])
def test_rank_0_warns_once_of_a_loss_that_averages(run_ranks, kind, loss):
    strategy = Strategy(pp=2)

    def train(rank, group):
        model = SwitchableModel(layers_of(kind), strategies=[strategy], process_group=group)
        planner = planner_of(kind, strategy)
        trainer = MicroBatchTrainer(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            LocalPlans(planner),
            batch_from=MAKE[kind][1].of,
            hollow=MAKE[kind][1].hollow,
            sizes=SIZES[kind],
            loss=loss,
        )
        with caught_log_lines() as lines:
            for iteration in range(2):
                lengths = planner.lengths_of(iteration)
                trainer.step(samples_of(kind, lengths, iteration), lengths)
        return [line for line in lines if "averages" in line]

    by_rank = run_ranks(train, 2)
    assert by_rank[1] == [] and len(by_rank[0]) == (loss is mean_loss)
    assert all("reduction='sum'" in line for line in by_rank[0])
