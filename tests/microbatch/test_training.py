"""Planned micro-batches, on replicas of pipelines of divided layers, train as the undivided model does."""

import os

import pytest
import torch
import torch.nn.functional as F
from helpers.micro_batches import (
    MAKE,
    Lengths,
    LocalPlans,
    Undivided,
    layers_of,
    planner_of,
    samples_of,
    trainer_of,
)
from helpers.on_ranks import on_ranks
from helpers.processes import for_each, told_by_survivors

from zeroresize.microbatch.padded import IGNORED
from zeroresize.microbatch.trainer import _tokens
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.microbatches.plan import MicroBatch, batch_fingerprint


def check_losses(kind, strategy, group, planner, *, plans=None, num_steps=3, dtype=torch.float64, rel=1e-10):
    """Losses and norms of training are those of the undivided model."""
    trainer, whole = trainer_of(kind, strategy, group, plans or LocalPlans(planner), dtype), Undivided(kind, dtype)
    for iteration in range(num_steps):
        lengths = planner.lengths_of(iteration)
        samples = samples_of(kind, lengths, iteration)
        report = trainer.step(samples, lengths)
        assert (report.loss, report.grad_norm) == pytest.approx(whole.step(samples, lengths), rel=rel)


@pytest.mark.parametrize("degrees", [(2, 1, 2), (1, 2, 2), (1, 1, 3)])
def test_losses_and_norms_are_the_undivided_models(run_ranks, degrees):
    strategy = Strategy(*degrees)

    @for_each([("gpt", 9), ("t5", 9), *([("gpt", 1)] if degrees == (2, 1, 2) else [])])  # or a replica has nothing
    def check(rank, group, kind, number):
        check_losses(kind, strategy, group, planner_of(kind, strategy, number))

    run_ranks(check, strategy.num_ranks)


@on_ranks(2, [({"method": "tokens", "size": 40},), ({"memory_limit": 300.0},), ({"schedule": "1f1b"},)])
def test_however_it_is_planned_results_are_the_same(rank, group, options):
    strategy = Strategy(pp=2)

    planner = planner_of("gpt", strategy, **options)
    assert ('"layers"' in planner(0)) == ("memory_limit" in options)
    check_losses("gpt", strategy, group, planner, dtype=torch.float32, rel=1e-5)


@on_ranks(2)
def test_a_plan_of_other_replicas_or_stages_is_refused_before_anything_runs(rank, group):
    trainer = trainer_of("gpt", Strategy(pp=2), group, LocalPlans(planner_of("gpt", Strategy(dp=2))))
    lengths = Lengths("gpt")(0)
    with pytest.raises(ValueError, match=r"iteration 0 was planned for 2 replicas of 1 stages: .* \(1, 1, 2\)"):
        trainer.step(samples_of("gpt", lengths), lengths)
    trainer.plans = LocalPlans(planner_of("gpt", Strategy(pp=2)))
    assert trainer.step(samples_of("gpt", lengths), lengths).num_tokens == lengths.sum()
    parameter = next(iter(trainer.model.parameters()))
    parameter.grad, lengths = torch.zeros_like(parameter) if rank else None, Lengths("gpt")(1)
    with pytest.raises(ValueError if rank else RuntimeError, match="have gradients" if rank else r"ranks \[1\]"):
        trainer.step(samples_of("gpt", lengths), lengths)


def test_a_rank_that_dies_in_a_step_is_named(tmp_path):
    strategy = Strategy(pp=3)

    def check(rank, group):
        planner = planner_of("gpt", strategy)
        trainer = trainer_of("gpt", strategy, group, LocalPlans(planner))
        lengths = planner.lengths_of(0)
        if rank == 1:
            layer = next(iter(trainer.model.stage_layers.values()))
            layer.register_forward_hook(lambda *_: os._exit(0))
        with pytest.raises(RuntimeError) as caught:
            trainer.step(samples_of("gpt", lengths), lengths)
        with pytest.raises(RuntimeError, match="a step failed here"):
            trainer.step(samples_of("gpt", lengths), lengths)
        return str(caught.value)

    texts = told_by_survivors(check, 3, tmp_path)
    assert texts.keys() == {0, 2} and all("ranks [1] of the group" in text for text in texts.values())


#: Classes that do not count, besides padding.
UNCOUNTED = 9


def targets_of(batch):
    return batch.targets.masked_fill(batch.targets < UNCOUNTED, IGNORED).flatten()


def loss_of(**options):
    return lambda output, batch: F.cross_entropy(output.flatten(0, 1), targets_of(batch), **options)


def knowing(output, batch):
    return loss_of(reduction="sum")(output, batch), (targets_of(batch) != IGNORED).sum()


WEIGHT = torch.linspace(0.0, 2.0, 19, dtype=torch.float64)
#: The loss, and what it is of a whole batch; more of them are tested with strategies, by the same trainer.
LOSSES = [
    (loss_of(), loss_of()),
    (loss_of(weight=WEIGHT, reduction="sum"), loss_of(weight=WEIGHT)),
    (knowing, loss_of()),
]


@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
@on_ranks(2, LOSSES)
def test_losses_count_as_undivided_also_when_evaluated(rank, group, loss, expected, *, degrees):
    """In micro-batches of one sample; of every third sample nothing counts, and of the last batch nothing at all."""
    strategy = Strategy(*degrees)

    planner = planner_of("gpt", strategy, method="fixed", size=1)
    trainer = trainer_of("gpt", strategy, group, LocalPlans(planner), loss=loss)
    lengths, layers = planner.lengths_of(0), layers_of("gpt")
    samples = samples_of("gpt", lengths)
    samples = [sample if number % 3 else sample % UNCOUNTED for number, sample in enumerate(samples)]
    batch = MAKE["gpt"][1].of(samples, MicroBatch.of(range(len(samples)), lengths))
    x = batch.inputs
    for layer in layers:
        x = layer(x, batch)
    value = expected(x, batch)
    value.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in layers.parameters()]).norm().item()
    assert trainer.evaluate(samples, lengths, 20) == pytest.approx(value.item(), rel=1e-10)
    report = trainer.step(samples, lengths)
    assert (report.loss, report.grad_norm) == pytest.approx((value.item(), norm), rel=1e-10)
    if loss is knowing:
        lengths = planner.lengths_of(1)
        nothing = [sample % UNCOUNTED for sample in samples_of("gpt", lengths)]
        for call in (lambda: trainer.evaluate(nothing, lengths, 20), lambda: trainer.step(nothing, lengths)):
            with pytest.raises(ValueError, match="there is no mean"):
                call()


def changed(samples, how, rank):
    """What a rank is given in place of the samples: other ones on rank 1 alone, or on all ranks."""
    samples = list(samples)
    parts = [sample if isinstance(sample, tuple) else (sample,) for sample in samples]
    if how == "fewer":
        return samples[:-1]
    if how == "more on rank 1":
        return samples + samples[:1] if rank else samples
    if how == "shorter":
        shorter = (*parts[3][:-1], parts[3][-1][:-1])
        samples[3] = shorter if isinstance(samples[3], tuple) else shorter[0]
    elif rank:
        parts[5][0][0] += 1
    return samples


#: What is raised on rank 0 and on rank 1.
TOLD = {
    "fewer": ["8 samples and 9 lengths were given"] * 2,
    "more on rank 1": [r"ranks \[1\] of the group failed", "10 samples and 9 lengths were given"],
    "shorter": ["sample 3 has|of the group failed"] * 2,
    "other tokens": ["samples have other tokens on rank 1 than on rank 0"] * 2,
}


def test_samples_that_do_not_fit_their_lengths_are_named_before_anything_runs(run_ranks):
    """Training goes on with the right ones afterwards."""
    strategy = Strategy(pp=2)

    @for_each([("gpt",), ("t5",)])
    def check(rank, group, kind):
        planner = planner_of(kind, strategy)
        trainer = trainer_of(kind, strategy, group, LocalPlans(planner))
        lengths = planner.lengths_of(0)
        before = [each.detach().clone() for each in trainer.model.parameters()]
        for how, texts in TOLD.items():
            for call in (trainer.step, lambda *given: trainer.evaluate(*given, 60)):
                with pytest.raises((ValueError, RuntimeError), match=texts[rank]):
                    call(changed(samples_of(kind, lengths), how, rank), lengths)
        assert all(map(torch.equal, before, trainer.model.parameters()))
        return trainer.step(samples_of(kind, lengths), lengths).loss

    first, second = run_ranks(check, 2, timeout_s=30)
    assert first == second and min(first) > 0.0


@on_ranks(2, timeout_s=30)
def test_replicas_are_not_compared_and_a_batch_that_cannot_be_made_is_told(rank, group):
    """Of samples that another replica trains a rank need not have the tokens."""
    strategy = Strategy(dp=2)

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


def test_samples_of_every_kind_of_number_are_compared():
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.bool, torch.int64, torch.complex64):
        for shape in ((), (4, 8)):
            first, second = (_tokens([torch.full(shape, number).to(dtype).t()]) for number in (0, 1))
            assert first and first != second and len(first) == len(second)
