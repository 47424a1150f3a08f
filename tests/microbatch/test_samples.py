"""Samples that are not those an iteration was planned for end in an error of all ranks before anything is computed."""

import numpy as np
import pytest
import torch
from helpers.micro_batches import LocalPlans, planner_of, samples_of

from tests.microbatch.test_training import trainer_of
from zeroresize.microbatch.sample_check import SampleCheck
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.microbatches.planning import batch_fingerprint


def changed(samples, how, rank):
    """What a rank is given in place of the samples: other ones on rank 1 alone, or on all ranks."""
    samples = list(samples)
    if how == "fewer":
        return samples[:-1]
    if how == "more on one":
        return samples + samples[:1] if rank else samples
    if how.startswith("shorter"):
        parts = samples[3] if isinstance(samples[3], tuple) else (samples[3],)
        shorter = (*parts[:-1], parts[-1][:-1])
        samples[3] = shorter if isinstance(samples[3], tuple) else shorter[0]
        return samples
    if how == "other tokens" and rank:
        parts = samples[5] if isinstance(samples[5], tuple) else (samples[5],)
        parts[0][0] += 1
    return samples


TOLD = {
    "fewer": "rank 0 was given 8 samples and 9 lengths",
    "more on one": "rank 1 was given 10 samples and 9 lengths",
    "shorter": "sample 3 has",
    "other tokens": "sample 5 has other tokens on rank 1 than on rank 0",
}


@pytest.mark.parametrize("kind", ["gpt", "t5"])
def test_samples_that_do_not_fit_their_lengths_are_named_on_all_ranks(run_ranks, kind):
    """Training goes on with the right ones afterwards."""
    strategy = Strategy(pp=2)

    def check(rank, group):
        planner = planner_of(kind, strategy)
        trainer = trainer_of(kind, strategy, group, LocalPlans(planner))
        lengths = planner.lengths_of(0)
        before = [one.detach().clone() for one in trainer.model.parameters()]
        for how, text in TOLD.items():
            for call in (trainer.step, lambda *given: trainer.evaluate(*given, 60)):
                with pytest.raises(ValueError, match=text):
                    call(changed(samples_of(kind, lengths), how, rank), lengths)
        assert all(map(torch.equal, before, trainer.model.parameters()))
        return trainer.step(samples_of(kind, lengths), lengths).loss

    first, second = run_ranks(check, 2, timeout_s=30)
    assert first == second > 0.0


def test_replicas_are_not_compared_and_a_batch_that_cannot_be_made_is_told(run_ranks):
    """Of samples that another replica trains a rank need not have the tokens."""
    strategy = Strategy(dp=2)

    def check(rank, group):
        planner = planner_of("gpt", strategy)
        trainer = trainer_of("gpt", strategy, group, LocalPlans(planner))
        lengths = planner.lengths_of(0)
        plan = trainer.plans.plan(0, batch_fingerprint(lengths))
        mine = {sample for each in plan.replicas[rank].microbatches for sample in each.samples}
        samples = [row if number in mine else row[:1] for number, row in enumerate(samples_of("gpt", lengths))]
        assert trainer.step(samples, lengths).loss > 0.0
        if rank:
            trainer._batch_from = lambda *_: [][0]
        lengths = planner.lengths_of(1)
        with pytest.raises(RuntimeError, match=["ranks .1. of the group failed", "list index out of range"][rank]):
            trainer.step(samples_of("gpt", lengths), lengths)

    run_ranks(check, 2, timeout_s=30)


def test_samples_of_every_kind_of_number_are_compared():
    check = SampleCheck(None, None)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.bool, torch.int64, torch.complex64):
        for shape in ((), (4, 8)):
            zeros, ones = (torch.full(shape, number).to(dtype).t() for number in (0, 1))
            first, second, again = (check.numbers([one], [0], np.array([[4]])) for one in (zeros, ones, zeros.clone()))
            assert first != second and first == again
